"""A cut sequence: every rank has the whole model, and some positions of every example."""

from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.context_parallel import Cut, columns, context_parallel, plain, zigzag
from minidist.planning.costs import context_parallel as costs
from minidist.planning.costs.attention import ring_bytes, ulysses_bytes
from minidist.replicas import sum_gradients
from minidist.rng import Randomness, generator
from minidist.verify.strategies.cases import Case, of_kind, padded, random_weights
from minidist.verify.strategies.job import Job, OnLoss
from minidist.verify.strategies.record import TRANSFORMER, Costs, Strategy


class CutSequence(Job):
    """A Transformer on this rank's positions of every example."""

    def __init__(self, group: Group, case: Case, attention: str, cut: Cut = zigzag):
        super().__init__(
            group,
            case,
            context_parallel(of_kind(nn.Transformer, case.model), group, attention, cut),
        )
        self.own = cut(case.inputs.shape[1], group.size)[group.rank]

    def backward(self, on_loss: OnLoss) -> None:
        case, held = self.case, self.own
        randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)), positions=held)
        logits = self.model(columns(case.inputs, held), randomness)
        loss = case.loss(logits, columns(case.targets, held), reduction_size=case.total)
        on_loss(loss).backward()
        sum_gradients(self.model.parameters(), self.group)


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


def _record(name: str, attention: str, costs: Costs, **fields) -> Strategy:
    """Return a record; `fields` are what it has of its own."""
    return Strategy(
        name=name,
        family="context",
        files=(f"context_parallel/{name}.py", "context_parallel/cuts.py"),
        lesson="14_context_parallel",
        start=partial(CutSequence, attention=attention),
        cases=context_cases,
        costs=replace(costs, cuts="positions"),
        models=TRANSFORMER,
        tests=tuple(
            f"context_parallel/test_{file}.py" for file in (name, "attention", "transformer")
        ),
        **fields,
    )


STRATEGIES = [
    _record(
        name="ring_attention",
        attention="ring",
        idea="positions over ranks, keys and values go round",
        term="上下文并行, 环形注意力",
        paper="Liu et al. 2023, section 3",
        costs=Costs(
            bytes=partial(costs.context_bytes, attention=ring_bytes),
            of_ranks=costs.ring_costs,
            limit=costs.positions_limit,
            useful=partial(costs.balance, costs=costs.ring_costs),
        ),
    ),
    _record(
        name="ulysses",
        attention="ulysses",
        idea="positions over ranks, in attention heads",
        term="上下文并行, 序列与注意力头互换",
        paper="Jacobs et al. 2023, section 3",
        costs=Costs(
            bytes=partial(costs.context_bytes, attention=ulysses_bytes),
            of_ranks=costs.ulysses_costs,
            limit=costs.heads_limit,
            useful=partial(costs.balance, costs=costs.ulysses_costs),
        ),
    ),
]
