"""Versions of an asynchronous stage's weights; PipeDream's question is which one a pass uses.

A version is a vector of weights, and the number of updates in it. The number is read from the
version that a pass really uses, so that the record shows what happened.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.nn.flat_parameters import FlatParameters
from minidist.optim import Optimizer
from minidist.pipeline_parallel.stage import Stage
from minidist.replicas import sum_gradients

# Which version the forward pass of minibatch b uses, of p stages with `every` micro-batches per
# update, when `version` is the newest.


def newest(b: int, version: int, p: int, every: int) -> int:
    """Weight stashing: the newest version when the pass begins."""
    return version


def vertical_sync(b: int, version: int, p: int, every: int) -> int:
    """Vertical sync: the version that the first stage used for this minibatch."""
    return max(0, b - (p - 1))


def double_buffered(b: int, version: int, p: int, every: int) -> int:
    """2BW: one update older than the newest version when this update's first micro-batch began."""
    return max(0, b // every - 1)


@dataclass(eq=False)
class Version:
    """Weights, and how many updates are in them: an integer, whatever the weights' dtype."""

    weights: Array
    number: int = 0

    def copy(self) -> "Version":
        return Version(self.weights.copy(), self.number)


class WeightVersions:
    """A stage's parameters in one flat vector; older versions are kept while they are needed.

    optimizer  parameters -> Optimizer
    choose     (minibatch, newest version) -> the version that its forward pass uses, both counted
               from the beginning of the stream; backward uses the same one
    stash      whether an update writes to a new buffer; False: in place, although passes in flight
               still use the old weights
    used       ("F" or "B", minibatch, version) of every pass so far
    most       the most buffers that were kept at once
    """

    def __init__(self, parameters: list[nn.Parameter], optimizer: Callable, choose, stash=True):
        self.flat = FlatParameters([p for p in parameters if p.requires_grad])
        self.optimizer: Optimizer = optimizer(self.flat.parameters)
        self.choose, self.stash = choose, stash
        self.newest = Version(self.flat.vector)
        self.begin(0)
        self.used: list[tuple[str, int, int]] = []
        self.most = 1

    def begin(self, minibatches: int) -> None:
        """Begin a stream of minibatches, numbered from 0, with the newest weights."""
        self.first, self.next, self.stop = self.version, 0, minibatches
        self.in_flight: dict[int, Version] = {}  # minibatch -> the version its graph holds
        self.kept = {self.version: self.newest}  # those that a forward pass may still choose

    def rest(self) -> None:
        """Bind the parameters to the newest weights: no pass is in flight."""
        self.flat.bind(self.newest.weights)

    @property
    def version(self) -> int:
        """The number of updates in the newest weights."""
        return self.newest.number

    def forward(self, b: int) -> None:
        """Bind the parameters to the version that the forward pass of b uses."""
        version = self.first + self.choose(b, self.version - self.first)
        self.forget_before(version)
        self.next = b + 1
        self.use("F", b, self.kept[version])
        self.in_flight[b] = self.kept[version]
        self.most = max(self.most, len({*self.kept.values(), *self.in_flight.values()}))

    def backward(self, b: int) -> None:
        """Bind them to the version that the forward pass of b used."""
        self.use("B", b, self.in_flight.pop(b))

    def forget_before(self, version: int) -> None:
        """Keep no version that no forward pass may choose again."""
        self.kept = {n: kept for n, kept in self.kept.items() if n >= version}

    def use(self, letter: str, b: int, version: Version) -> None:
        """Bind the parameters to a version, and note that a pass has used it."""
        self.flat.bind(version.weights)
        for p in self.flat.parameters:
            p.updated = 0  # a graph in flight holds its own version, or is to be seen going wrong
        self.used.append((letter, b, version.number))

    def update(self) -> None:
        """Apply the gradients so far to the newest weights."""
        if self.stash:
            after = self.version + 1 - self.first
            chosen = self.choose(self.next, after) if self.next < self.stop else after
            self.forget_before(self.first + chosen)
            self.newest = self.newest.copy()
        self.newest.number += 1
        self.kept[self.version] = self.newest
        self.flat.bind(self.newest.weights)
        self.optimizer.step()
        self.optimizer.zero_grad()


class VersionedStage(Stage):
    """A stage whose passes each choose the version of the weights that they use."""

    weights: WeightVersions
    replicas: Group | None = None

    def forward(self, i: int) -> None:
        self.weights.forward(i)
        super().forward(i)

    def backward(self, i: int) -> None:
        self.weights.backward(i)
        super().backward(i)

    def update(self, i: int) -> None:
        if self.replicas is not None:
            sum_gradients(self.weights.flat.parameters, self.replicas)
        self.weights.update()
