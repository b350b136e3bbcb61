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
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.errors import WrongInput, check_name, check_options
from minidist.nn.flat_parameters import check_flat
from minidist.optim import Optimizer
from minidist.pipeline_parallel.checks import check_alike, check_untied
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.holders import take_over
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.pipedream import pipedream_2bw_programs, pipedream_programs
from minidist.pipeline_parallel.placement import Programs, last_stage
from minidist.pipeline_parallel.weight_versions import (
    VersionedStage,
    WeightVersions,
    double_buffered,
    newest,
    vertical_sync,
)
from minidist.replicas import from_holders, load_own, shapes_of
from minidist.trainer import WholeBatches

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
        self.batches = WholeBatches(self.model, sends=group.size > 1)
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
