"""A cut sequence: every rank has the whole model, and some positions of every example."""

from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.context_parallel import ContextParallel, plain
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    padded,
    random_weights,
    transformer_example,
)
from minidist.verify.strategies.record import TRANSFORMER, Costs, Strategy, record
from minidist.verify.strategies.tensor_parallel import heads_limit


def context_cases(ranks: int) -> list[Case]:
    """Even pieces, uneven and empty ones, a position per rank; tied with dropout, and untied.

    Cut by zig-zag, and two of them by the plain cut. Two blocks, so that K, V go round twice. One
    has several documents in a window, one grouped queries: 4 heads of keys and values for 12.
    """
    tokens, nexts = generator(0, "context cases").integers(0, 11, (2, 3, 24))
    dropped = random_weights(nn.Transformer(11, 24, 12, 2, 24, 2, "float64", 0.2, tied=True))
    free = random_weights(nn.Transformer(11, 24, 12, 2, 24, 2, "float64"))
    grouped = random_weights(nn.Llama(11, 24, 12, 4, 2, 24, 2, "float64"))

    def case(name: str, model: nn.Module, T: int, **options) -> Case:
        return Case(name, model, tokens[:, :T], nexts[:, :T], options=options)

    part = case("13 positions, padded", free, 13)
    return [
        case("24 positions", dropped, 24),
        case("24 positions, plain cut", free, 24, cut=plain),
        replace(part, targets=padded(part.targets)),
        case("13 positions, plain cut", dropped, 13, cut=plain),
        case("a position per rank", dropped, ranks),
        replace(case("24 positions, documents", dropped, 24), documents=documents(3, 24)),
        replace(case("13 positions, grouped queries", grouped, 13), documents=documents(3, 13)),
    ]


def documents(B: int, T: int) -> np.ndarray:
    """Return numbers of documents [B, T]: of 1 to 7 positions, other ones in each example."""
    starts = generator(0, "documents").random((B, T)) < 0.3
    return np.cumsum(starts, axis=1)


def usp_cases(ranks: int) -> list[Case]:
    """The cases above, with two neighbours that exchange heads; of 3 ranks three."""
    U = {1: 1, 3: 3}.get(ranks, 2)
    return [replace(c, options=c.options | {"ulysses": U}) for c in context_cases(ranks)]


def positions_limit(case: Case, ranks: int) -> tuple[int, str]:
    return case.inputs.shape[1], "positions"


def over_positions(
    name: str, attention: str, cases=context_cases, limit=positions_limit, **more
) -> Strategy:
    """Return the record of an attention; `more` are further fields of its costs."""
    return record(
        name,
        make=partial(ContextParallel, attention=attention),
        cases=cases,
        costs=Costs(limit=limit, cuts="positions", **more),
        models=TRANSFORMER,
    )


STRATEGIES = [
    over_positions("ring_attention", "ring"),
    over_positions("gathered_attention", "gathered", compared=False),
    over_positions("ulysses", "ulysses", limit=heads_limit),
    over_positions(
        "usp",
        "ring",
        usp_cases,
        compared=False,
        example=lambda ranks: transformer_example(ranks, ulysses=1 if ranks % 2 else 2),
    ),
]
