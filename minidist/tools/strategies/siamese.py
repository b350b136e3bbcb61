"""Siamese branches: one rank runs both, or each of two ranks runs one."""

from collections import Counter

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.pipeline_parallel import branch_placement
from minidist.planning.costs import branch_placement as costs
from minidist.rng import Randomness, generator
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import INPUT, Case, Outcome, bytes_sent, collect
from minidist.tools.strategies.record import SIAMESE, Costs, Strategy


def siamese_worker(group: Group, case: Case, micro_batches: int = 1) -> Outcome:
    """Run one batch of pairs under pipeline_parallel/branch_placement.py."""
    model = case.model
    inputs = []
    for examples in np.array_split(np.arange(len(case.inputs)), micro_batches):
        x = Tensor(case.inputs[examples], requires_grad=True)
        inputs.append(x)
        branch_placement.forward_backward(
            model,
            x,
            case.targets[examples],
            group,
            case.loss,
            case.total,
            Randomness(case.seed, 0, examples),
        )
    branch_placement.all_reduce_shared(model, group)
    return _outcome(group, model, inputs, bytes_sent(group))


def _outcome(group: Group, model: nn.Siamese, inputs: list[Tensor], moved: Counter) -> Outcome:
    """Give every rank what only one holds: the join's gradient, and each half of the input's."""
    result = collect(model)
    for name in model.join.named_parameters():
        result[name] = group.broadcast(result[name], branch_placement.JOIN)
    rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in inputs]
    result[INPUT] = group.all_reduce(np.concatenate(rows))  # the half of the other rank is zero
    return Outcome(result, moved.total(), operations=dict(moved))


def siamese_cases(ranks: int) -> list[Case]:
    """Seven pairs in three classes, and a single pair with an output to fit."""
    random = generator(0, "siamese cases")
    pairs, labels = random.standard_normal((7, 2, 6)), random.integers(0, 3, 7)
    model = nn.Siamese([6, 9, 4], classes=3, activation="gelu", seed=1, dtype="float64")
    single = nn.Siamese([6, 5, 5], classes=2, activation="relu", seed=2, dtype="float64")
    outputs = random.standard_normal((1, 2))
    return [
        Case("7 pairs", model, pairs, labels),
        Case("1 pair", single, pairs[:1], outputs, nn.squared_error),
    ]


def siamese_example(ranks: int) -> Case:
    """Return a separate model for the table of costs: no Transformer has two branches."""
    random = generator(0, "strategy table")
    labels, pairs = random.integers(0, 2, 8), random.standard_normal((8, 2, 64))
    return Case("example", nn.Siamese([64, 128, 64, 32], dtype="float64"), pairs, labels)


class WatchedSiamese(nn.Siamese):
    """A model whose graphs a watch inspects: each new one, together with those in flight."""

    def __init__(self, model: nn.Siamese, watch: Watch):
        self.branch, (self.join,) = watch.layers(model.branch), watch.layers([model.join])
        self.watch, self.flight = watch, []
        self.weights = [p.data for p in model.parameters()]

    def embed(self, x, randomness=None):
        return self._seen(super().embed(x, randomness))

    def compare(self, h0, h1):
        return self._seen(super().compare(h0, h1))

    def _seen(self, y: Tensor) -> Tensor:
        self.flight.append(self.watch.graph(y, self.flight, self.weights))
        return y


def siamese_step(group: Group, case: Case, watch: Watch) -> None:
    """One step with AdamW, watched."""
    model = WatchedSiamese(case.model, watch)
    branch_placement.forward_backward(model, case.inputs, case.targets, group, case.loss)
    branch_placement.all_reduce_shared(model, group)
    watch.sends(group)
    optimizer = adamw(branch_placement.own_parameters(case.model, group))
    optimizer.step()
    watch.holds([case.model.flat], optimizer)


STRATEGIES = [
    Strategy(
        name="siamese",
        idea="two branches of one network on two ranks at once",
        term="孪生网络",
        paper="Bromley et al. 1993 (the model)",
        family="branches",
        files=("pipeline_parallel/branch_placement.py",),
        lesson="06_layer_split",
        worker=siamese_worker,
        promise="exact",
        cases=siamese_cases,
        costs=Costs(
            costs.siamese_bytes,
            costs.siamese_costs,
            siamese_step,
            costs.branches_limit,
            "branches",
            example=siamese_example,
        ),
        ranks=(1, 2),
        models=SIAMESE,
        tests=("pipeline_parallel/test_branch_placement.py",),
    )
]
