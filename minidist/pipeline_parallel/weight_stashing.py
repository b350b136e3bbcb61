"""Weight stashing: train on PipeDream's programs, and keep the old weights that backward needs.

Narayanan et al. 2019 (SOSP), section 3.3; 2BW: Narayanan et al. 2021 (ICML), section 3.1. Letters:
p stages, s one of them; minibatch b; version = updates that have been applied to a stage's weights.

    weight stashing  forward and backward of b use the same version: max(0, b - (p - 1 - s))
    vertical sync    ... and so do all stages: max(0, b - (p - 1))
    2BW              m micro-batches per update: the k-th one (from 1) uses version
                     max(0, floor((k - 1)/m) - 1), so that two versions are enough; the paper
                     asks for m >= p, for these programs p - 1 is enough
    none             backward uses the newest version: not a gradient of anything

An update writes to a new buffer; a graph in flight keeps the old one. The gradient, of old weights,
is applied to the newest weights and to the optimizer's state.

A version is a vector of weights, and the number of updates in it. The number is read from the
version that a pass really uses, so that the record shows what happened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput, check_name, check_options
from minidist.nn.datasets import Batch
from minidist.nn.flat_parameters import FlatParameters, check_flat
from minidist.nn.optim import Optimizer
from minidist.parallel import from_holders, load_own, shapes_of, sum_gradients
from minidist.parallel.trainer import STAGES_SENT, WholeBatches
from minidist.pipeline_parallel.actions import Programs, last_stage
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.holders import check_alike, check_untied, cut_of, take_over
from minidist.pipeline_parallel.pipedream import pipedream_2bw_programs, pipedream_programs
from minidist.pipeline_parallel.stage import Stage

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


Scheme = tuple[Callable[..., Programs], Callable[..., int], bool]
SCHEMES: dict[str, Scheme] = {  # programs, which version a forward pass uses, new buffers or not
    "weight_stashing": (pipedream_programs, newest, True),
    "vertical_sync": (pipedream_programs, vertical_sync, True),
    "none": (pipedream_programs, newest, False),
    "2bw": (pipedream_2bw_programs, double_buffered, True),
}


UNSYNCHRONISED = (
    "stages that update at different times, so that there is no global norm: do not clip"
)


class PipeDream:
    """This rank's stage of a model that is trained without flushes.

        pipe = PipeDream(model, group, lambda parameters: optim.SGD(parameters, lr=0.1))
        losses = pipe.train(minibatches)                                # {minibatch: its loss}

    model      the whole model, the same on every rank, of which the rank's layers are kept
    optimizer  parameters -> Optimizer
    scheme     a key of SCHEMES; "none" is wrong, and there to be seen
    loss       (outputs, targets, reduction_size=) -> a scalar tensor, on the last stage
    cut        layers per stage, as ranges; by default as many each
    check_weights
               whether the ranks compare their weights at first (see check_same_weights)
    options    replicas= or, for 2BW, update_every=
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        scheme: str = "weight_stashing",
        loss: Callable | None = None,
        cut: list[range] | None = None,
        check_weights: bool = True,
        **options,
    ):
        check_name("scheme", scheme, SCHEMES)
        check_options(SCHEMES[scheme][0], options, scheme)
        if scheme == "vertical_sync" and options.get("replicas"):
            raise WrongInput("replicas of a stage see different minibatches: no vertical sync")
        self.group, self.options = group, options
        every = options.get("update_every") or max(1, group.size - 1)
        self.programs_for, choose, stash = SCHEMES[scheme]
        placement = self.programs_for(group.size, 1, **options).placement
        last = last_stage(placement)
        self.cut = cut_of(len(model.layers), last + 1, cut)
        shape = f"stages of {[len(part) for part in self.cut]} layers"
        description = ", ".join([scheme, shape, *(f"{k}={v}" for k, v in options.items())])
        together = every if scheme == "2bw" else 1  # micro-batches of an update
        self.check_group = check_alike(model, group, description, together, check_weights)
        check_untied(model, self.cut)
        self.shapes = shapes_of(model)
        (k,) = placement[group.rank]
        layers = [model.layers[i] for i in self.cut[k]]
        self.model = take_over(model, layers, UNSYNCHRONISED)
        self.stage = VersionedStage(layers, k == 0, k == last, loss or model.loss)
        stuck = STAGES_SENT if group.size > 1 else ""
        self.batches = WholeBatches(self.model.zero_grad, stuck)
        choose = partial(choose, p=group.size, every=every)
        self.stage.weights = WeightVersions(self.model.parameters(), optimizer, choose, stash)
        if placement.count([k]) > 1:
            self.stage.replicas = group.split(k)
        elif len(placement) > last + 1:
            group.split(None)

    def train(self, minibatches: list[Batch]) -> dict[int, float]:
        """Send minibatches through, from empty to empty; return the losses that this rank saw.

        Of 2BW these are micro-batches. Each one's `total` says by what its loss is divided.
        """
        check_flat(self.model.parameters(), [self.stage.weights.flat])
        programs = add_communication(
            self.programs_for(self.group.size, len(minibatches), **self.options)
        )
        with self.batches.batch():
            self.stage.begin(minibatches)
            self.stage.weights.begin(len(minibatches))
            try:
                execute(programs[self.group.rank], self.group, [self.stage])
            finally:  # also after an error: `state` and `load_state` are of the newest weights
                self.stage.weights.rest()
        return self.stage.losses

    def state(self) -> dict[str, np.ndarray]:
        """Return the newest weights of the whole model, on every rank and on the host, by name."""
        return from_holders(self.model.state(), self.shapes, self.group)

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into this rank's stage."""
        load_own(self.model, state, self.shapes, self.check_group)

    @property
    def used(self) -> list[tuple[str, int, int]]:
        """("F" or "B", minibatch, version of the weights that this stage used), in order."""
        return self.stage.weights.used
