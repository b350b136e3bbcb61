"""A model cut into stages, trained under any synchronous schedule, yours too.

    pipeline = Pipeline(model, group, "1f1b", micro_batches=8)          # or Pipeline(.., programs)
    optimizer = optim.AdamW(pipeline.parameters(), lr=3e-4)             # of this rank's layers
    loss = pipeline.backward(Batch(inputs, targets))                    # the whole batch's
    optimizer.clip_global_norm(1.0, pipeline.sum_squares)
    pipeline.step(optimizer)
    weights = pipeline.state()                                          # of the whole model

Layouts: rank r holds W of its stages; X[B/m, ...] and dX[B/m, ...] cross between neighbours. Bytes:
one micro-batch's activation per boundary and direction, all together 2 (p v - 1) B T C itemsize.

A parameter that two stages share (a tied embedding, in the first and the last stage) gets a part of
its gradient on each of the two ranks; the parts are summed once, after the program.
"""

from collections.abc import Callable

import numpy as np

from minidist import nn
from minidist.backend import Array, host_copy
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.parallel import (
    check_statistics,
    from_holders,
    gradient,
    load_own,
    shapes_of,
    sum_gradients,
    sum_squares_over,
)
from minidist.parallel.trainer import (
    AnyOptimizer,
    WholeBatches,
    check_scale,
    evaluating,
    update,
    without_dropout,
)
from minidist.pipeline_parallel.actions import (
    Action,
    Forward,
    RecvActivation,
    SendActivation,
    communicates,
    digest,
    last_stage,
    micro_batches_of,
)
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.holders import check_alike, shared_groups, take_over
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.reduction import NO_SUMS, OverlappedSums, add_reductions
from minidist.pipeline_parallel.schedules import order_of
from minidist.pipeline_parallel.stage import Stage

STAGES = "the stages of a pipeline: pass sum_squares=pipeline.sum_squares"


class Pipeline:
    """This rank's stages of a model, and the programs of all ranks.

    model            the whole model, the same on every rank; this rank's layers are taken over, so
                     ask the pipeline for the state
    schedule         a name, and micro_batches (by default 4), chunks and options as for `programs`;
                     or programs, yours too, from which both numbers are taken (see `order_of`)
    cut              layers per virtual stage, as ranges (see partition.py), the same on every rank,
                     even if costs were measured; by default equal numbers of layers
    recompute        keep only the inputs of a stage (see Stage)
    rendezvous_safe  see `add_communication`
    loss             (outputs, targets, reduction_size=) -> a scalar tensor; None: the model's
    check_weights    whether the ranks first compare their weights (see check_same_weights)
    sums             (layers) -> None, if there are copies of the stages: sums the layers' gradients
                     over the ranks that have them; begun at each R (see reduction.py)
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        schedule: str | list[list[Action]] = "1f1b",
        micro_batches: int | None = None,
        chunks: int | None = None,
        loss: Callable | None = None,
        cut: list[range] | None = None,
        recompute: bool = False,
        rendezvous_safe: bool = False,
        check_weights: bool = True,
        sums: Callable[[list[nn.Module]], None] | None = None,
        **options,
    ):
        order = order_of(schedule, group.size, micro_batches, chunks, **options)
        self.group = group
        self.loss_group = group.split(0)  # the ledger of `group` has what programs send, alone
        self.m = micro_batches_of(order) if micro_batches is None else micro_batches
        order = order if sums is None else add_reductions(order)
        self.programs = order if communicates(order) else add_communication(order, rendezvous_safe)
        placement, last = order.placement, last_stage(order.placement)
        self.cut = cut_of(len(model.layers), last + 1, cut)
        lengths = [len(part) for part in self.cut]
        name = schedule if isinstance(schedule, str) else f"programs {digest(order)}"
        description = f"{name}, {self.m} micro-batches, stages of {lengths} layers"
        self.check_group = check_alike(model, group, description, self.m, check_weights)
        self.shapes, loss = shapes_of(model), loss or model.loss
        self.stages = [
            Stage([model.layers[i] for i in self.cut[k]], k == 0, k == last, loss, recompute)
            for k in placement[group.rank]
        ]
        self.shared = shared_groups(model, self.cut, placement, group)
        layers = [layer for stage in self.stages for layer in stage.layers]
        self.model = take_over(model, layers, STAGES)
        self.batches = WholeBatches(self.model, sends=communicates(self.programs))
        self.sums = NO_SUMS if sums is None else self.sums_beside(sums)

    def sums_beside(self, sums: Callable[[list[nn.Module]], None]) -> OverlappedSums:
        """Return what sums the layers of this rank's stages during its program."""
        named, ranks = self.named_parameters(), self.shared.items()
        shared = {named[name] for name, group in ranks if group is not None}
        program = self.programs[self.group.rank]
        return OverlappedSums(program, self.stages, shared, self.group, sums)

    @property
    def groups(self) -> list[Group]:
        """All groups that it communicates through, each with a ledger."""
        shared = [group for group in self.shared.values() if group is not None]
        return [self.group, self.loss_group, *shared]

    def parameters(self) -> list[nn.Parameter]:
        return self.model.parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.model.named_parameters()

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return the whole loss.

        Every rank gets the batch. Inputs are needed only by the rank of the first stage, targets
        only by the rank of the last.
        """
        loss = self.run(batch.micro_batches(self.m))
        return float(self.loss_group.all_reduce(np.array(loss), label="loss"))

    def run(self, batch: list[Batch]) -> float:
        """Compute the gradient of a batch that is cut into micro-batches; return this rank's loss.

        The rank with the last stage returns the whole loss, the other ranks 0.
        """
        if len(batch) != self.m:
            raise WrongInput(f"the programs are for {self.m} micro-batches, not {len(batch)}")
        check_statistics(self.model, micro_batches=self.m, loads=True)  # as now: it may train again
        check_scale(self.model, batch[0])
        with self.batches.batch():
            for stage in self.stages:
                stage.begin(batch)
            before = self.take_shared_gradients()
            with self.sums.within():
                execute(self.programs[self.group.rank], self.group, self.stages, self.sums)
            self.sum_shared_gradients(before)
            self.sums.finish()
        return sum((part for stage in self.stages for part in stage.losses.values()), start=0.0)

    def evaluate(self, batch: Batch) -> float:
        """Return the whole batch's loss, without dropout and gradient, in the mode of `eval`."""
        loss = self.run_forward(without_dropout(batch).micro_batches(self.m))
        return float(self.loss_group.all_reduce(np.array(loss), label="loss"))

    def run_forward(self, batch: list[Batch]) -> float:
        """Run the forward passes of the programs alone; return this rank's loss."""
        kinds = Forward | RecvActivation | SendActivation
        own = self.programs[self.group.rank]
        program: list[Action] = [action for action in own if isinstance(action, kinds)]
        with self.batches.forward_alone(), evaluating(self.model):
            for stage in self.stages:
                stage.begin(batch)
            execute(program, self.group, self.stages)
            losses = [part for stage in self.stages for part in stage.losses.values()]
            for stage in self.stages:
                stage.begin([])
        return sum(losses, start=0.0)

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update this rank's layers; drop the gradients."""
        self.batches.check()
        update(optimizer, self.model)

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once.

        own  from Optimizer.clip_global_norm, this rank's own sum, used only as a check
        """
        return sum_squares_over(self.counted_here(), self.parameters(), own, self.group)

    def counted_here(self) -> list[nn.Parameter]:
        """Return this rank's parameters, except tied ones that an earlier rank counts."""
        first = {name for name, group in self.shared.items() if group is None or not group.rank}
        own = self.named_parameters().items()
        return [p for name, p in own if name in first or name not in self.shared]

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the whole gradients by name, on every rank and on the host, before the step."""
        return self.whole({name: gradient(p) for name, p in self.named_parameters().items()})

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""
        return self.whole({name: p.data for name, p in self.named_parameters().items()})

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return copies of whole arrays on the host, given what this rank has of parameters."""
        mine = {name: host_copy(array) for name, array in own.items()}
        return from_holders(mine, self.shapes, self.group)

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into this rank's layers."""
        load_own(self.model, state, self.shapes, self.check_group)

    def take_shared_gradients(self) -> dict[str, Array | None]:
        """Set the gradients of earlier batches aside: they have been summed already."""
        taken = {}
        for name, group in self.shared.items():
            if group is not None:
                p = self.named_parameters()[name]
                taken[name] = None if p.grad is None else p.grad.copy()
                p.grad = None
        return taken

    def sum_shared_gradients(self, before: dict[str, Array | None]) -> None:
        """Sum over the ranks what this batch has left; add what was set aside."""
        for name, earlier in before.items():
            p, group = self.named_parameters()[name], self.shared[name]
            assert group is not None
            sum_gradients([p], group)
            p.grad = p.grad if earlier is None else earlier + p.grad
