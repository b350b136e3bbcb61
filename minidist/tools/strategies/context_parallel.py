"""A cut sequence: every rank has the whole model, and some positions of every example."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.context_parallel import Cut, columns, context_parallel, plain, zigzag
from minidist.planning.costs import context_parallel as costs
from minidist.replicas import sum_gradients
from minidist.rng import Randomness, generator
from minidist.tools.costs.watch import Watch, watched_step
from minidist.tools.strategies.cases import (
    Case,
    Outcome,
    Split,
    bytes_sent,
    collect,
    padded,
    random_weights,
)
from minidist.tools.strategies.record import TRANSFORMER, Costs, Strategy


def context_worker(group: Group, case: Case, attention: str, cut: Cut = zigzag) -> Outcome:
    """Run forward and backward of a Transformer on this rank's positions; sum the gradients."""
    model = context_parallel(case.model, group, attention, cut)
    loss_of_own(group, case, model, cut).backward()
    sum_gradients(model.parameters(), group)
    moved = bytes_sent(group)
    return Outcome(collect(model), moved.total(), operations=dict(moved))


def loss_of_own(group: Group, case: Case, model: nn.Module, cut: Cut):
    """Return the loss of this rank's positions, divided by the number of all targets."""
    held = cut(case.inputs.shape[1], group.size)[group.rank]
    examples = np.arange(len(case.inputs))
    logits = model(columns(case.inputs, held), Randomness(case.seed, 0, examples, positions=held))
    return case.loss(logits, columns(case.targets, held), reduction_size=case.total)


def by_positions(case: Case, ranks: int) -> Split:
    return Split(positions=tuple(costs.held_by(case, ranks)))


def context_cases(ranks: int) -> list[Case]:
    """Even pieces, uneven and empty ones, a position per rank; tied with dropout, and untied.

    Cut by zig-zag, and two of them by the plain cut. Two blocks, so that K, V go round twice.
    """
    tokens, nexts = generator(0, "context cases").integers(0, 11, (2, 3, 24))
    dropped = random_weights(nn.Transformer(11, 24, 12, 2, 24, 2, "float64", 0.2, tied=True))
    free = random_weights(nn.Transformer(11, 24, 12, 2, 24, 2, "float64"))

    def case(name: str, model: nn.Module, T: int, **options) -> Case:
        return Case(name, model, tokens[:, :T], nexts[:, :T], options=options)

    part = case("13 positions, padded", free, 13)
    return [
        case("24 positions", dropped, 24),
        case("24 positions, plain cut", free, 24, cut=plain),
        replace(part, targets=padded(part.targets)),
        case("13 positions, plain cut", dropped, 13, cut=plain),
        case("a position per rank", dropped, ranks),
    ]


def context_step(group: Group, case: Case, watch: Watch, attention: str) -> None:
    """One step with AdamW, watched."""
    model = context_parallel(case.model, group, attention)
    loss = partial(loss_of_own, group, case, model, zigzag)
    watched_step(watch, group, model, loss, lambda: sum_gradients(model.parameters(), group))


def _record(
    name: str, attention: str, idea: str, term: str, paper: str, nbytes: Callable, more: tuple
) -> Strategy:
    """more: what each rank holds, and the most ranks."""
    of_ranks, limit = more
    return Strategy(
        name=name,
        idea=idea,
        term=term,
        paper=paper,
        family="context",
        files=(f"context_parallel/{name}.py", "context_parallel/cuts.py"),
        lesson="14_context_parallel",
        worker=partial(context_worker, attention=attention),
        promise="exact",
        cases=context_cases,
        costs=Costs(
            partial(costs.context_bytes, attention=nbytes),
            of_ranks,
            partial(context_step, attention=attention),
            limit,
            "positions",
            useful=partial(costs.balance, costs=of_ranks),
        ),
        split=by_positions,
        models=TRANSFORMER,
        tests=tuple(
            f"context_parallel/test_{file}.py" for file in (name, "attention", "transformer")
        ),
    )


STRATEGIES = [
    _record(
        "ring_attention",
        "ring",
        "positions over ranks, keys and values go round",
        "上下文并行, 环形注意力",
        "Liu et al. 2023, section 3",
        costs.ring_bytes,
        (costs.ring_costs, costs.positions_limit),
    ),
    _record(
        "ulysses",
        "ulysses",
        "positions over ranks, in attention heads",
        "上下文并行, 序列与注意力头互换",
        "Jacobs et al. 2023, section 3",
        costs.ulysses_bytes,
        (costs.ulysses_costs, costs.heads_limit),
    ),
]
