"""A cut sequence: every rank has the whole model, and some positions of every example."""

from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.context_parallel import Cut, axes_of, columns, context_parallel, plain, zigzag
from minidist.replicas import sum_gradients, sum_loads
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    of_kind,
    padded,
    random_weights,
    transformer_example,
)
from minidist.verify.strategies.job import Job, OnLoss
from minidist.verify.strategies.record import TRANSFORMER, Costs, Strategy
from minidist.verify.strategies.tensor_parallel import heads_limit


class CutSequence(Job):
    """A Transformer on this rank's positions of every example."""

    def __init__(
        self, group: Group, case: Case, attention: str, cut: Cut = zigzag, ulysses: int = 1
    ):
        axes = axes_of(group, ulysses) if ulysses != 1 else None
        model = of_kind(nn.Transformer, case.model)
        super().__init__(group, case, context_parallel(model, group, attention, cut, axes))
        self.own = cut(case.inputs.shape[1], group.size)[group.rank]
        self.groups += axes or ()

    def backward(self, on_loss: OnLoss) -> None:
        case, held = self.case, self.own
        x, y = columns(case.inputs, held), columns(case.targets, held)
        logits = self.model(x, replace(case.batch, inputs=x, targets=y, positions=held).randomness)
        on_loss(case.loss(logits, y, reduction_size=case.total)).backward()
        sum_gradients(self.model.parameters(), self.group)
        sum_loads(self.model, self.group)


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


def _record(name: str, attention: str, more: dict | None = None, **fields) -> Strategy:
    """Return a record; `fields` are what it has of its own, `more` what its costs have."""
    found = Costs(
        limit=lambda case, ranks: (case.inputs.shape[1], "positions"),
        cuts="positions",
    )
    return Strategy(
        name=name,
        family="context",
        files=(f"context_parallel/{name}.py", "context_parallel/cuts.py"),
        lesson="14_context_parallel",
        start=partial(CutSequence, attention=attention),
        costs=replace(found, **more or {}),
        models=TRANSFORMER,
        tests=tuple(
            f"context_parallel/test_{file}.py" for file in (name, "attention", "transformer")
        ),
        **{"cases": context_cases} | fields,
    )


STRATEGIES = [
    _record(
        name="ring_attention",
        attention="ring",
        idea="positions over ranks, keys and values go round",
        term="上下文并行, 环形注意力",
        paper="Liu et al. 2023, section 3",
    ),
    _record(
        name="gathered_attention",
        attention="gathered",
        idea="positions over ranks, keys and values gathered first",
        term="上下文并行, 汇集键值",
        paper="Dubey et al. 2024 (Llama 3), section 3.3.2",
        more={"compared": False},
    ),
    _record(
        name="ulysses",
        attention="ulysses",
        idea="positions over ranks, in attention heads",
        term="上下文并行, 序列与注意力头互换",
        paper="Jacobs et al. 2023, section 3",
        more={"limit": heads_limit},
    ),
    _record(
        name="usp",
        attention="ring",
        idea="positions over ranks: neighbours exchange heads, their groups form a ring",
        term="上下文并行, 环形与Ulysses混合",
        paper="Fang and Zhao 2024",
        cases=usp_cases,
        more={
            "compared": False,
            "example": lambda ranks: transformer_example(ranks, ulysses=1 if ranks % 2 else 2),
        },
    ),
]
