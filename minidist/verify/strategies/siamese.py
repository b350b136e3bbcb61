"""Siamese branches: one rank runs both, or each of two ranks runs one."""

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.pipeline_parallel import branch_placement
from minidist.rng import generator
from minidist.verify.strategies.cases import INPUT, Case, collect, of_kind
from minidist.verify.strategies.job import Arrays, Job, OnLoss, gradient_of
from minidist.verify.strategies.record import SIAMESE, Costs, Strategy
from minidist.verify.watch import Watch


class Branches(Job):
    """One of a model's two branches; or both, on one rank."""

    model: nn.Siamese

    def __init__(self, group: Group, case: Case, micro_batches: int = 1):
        self.whole = of_kind(nn.Siamese, case.model)
        super().__init__(group, case, self.whole)
        self.parts = np.array_split(np.arange(len(case.inputs)), micro_batches)
        self.inputs = [Tensor(case.inputs[part], requires_grad=True) for part in self.parts]

    def let_watch(self, watch: Watch) -> None:
        self.model = WatchedSiamese(self.model, watch)

    def backward(self, on_loss: OnLoss) -> None:
        case = self.case
        for x, part in zip(self.inputs, self.parts, strict=True):
            branch_placement.forward_backward(
                self.model,
                x,
                case.targets[part],
                self.group,
                case.loss,
                case.total,
                case.randomness(part),
            )
        branch_placement.all_reduce_shared(self.model, self.group)

    def result(self) -> Arrays:
        """Give every rank what one holds: the join's gradient, and each half of the input's."""
        found = collect(self.model)
        for name in self.model.join.named_parameters():
            found[name] = self.group.broadcast(found[name], branch_placement.JOIN)
        # The half that the other rank reads is zero here.
        return found | {INPUT: self.group.all_reduce(gradient_of(self.inputs))}

    def parameters(self) -> list[nn.Parameter]:
        return branch_placement.own_parameters(self.whole, self.group)

    def kept(self) -> dict:
        return super().kept() | {"homes": [self.whole.flat]}


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
        self.watch = watch
        self.flight: list[Tensor] = []
        self.weights = [p.data for p in model.parameters()]

    def embed(self, x, randomness=None):
        return self._seen(super().embed(x, randomness))

    def compare(self, h0, h1):
        return self._seen(super().compare(h0, h1))

    def _seen(self, y: Tensor) -> Tensor:
        self.flight.append(self.watch.graph(y, self.flight, self.weights))
        return y


STRATEGIES = [
    Strategy(
        name="siamese",
        idea="two branches of one network on two ranks at once",
        term="孪生网络",
        paper="Bromley et al. 1993 (the model)",
        family="branches",
        files=("pipeline_parallel/branch_placement.py",),
        lesson="06_layer_split",
        start=Branches,
        cases=siamese_cases,
        costs=Costs(
            limit=lambda case, ranks: (2, "branches"),
            cuts="branches",
            example=siamese_example,
        ),
        ranks=(1, 2),
        models=SIAMESE,
        tests=("pipeline_parallel/test_branch_placement.py",),
    )
]
