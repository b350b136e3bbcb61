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
from zlib import crc32

import numpy as np

from minidist import nn
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.parallel import (
    check_statistics,
    from_holders,
    shapes_of,
    sum_gradients,
    sum_squares_over,
)
from minidist.parallel.trainer import (
    STAGES_SENT,
    Trainer,
    WholeBatches,
    check_scale,
)
from minidist.pipeline_parallel.actions import (
    Action,
    Forward,
    RecvActivation,
    SendActivation,
    communicates,
    last_stage,
    micro_batches_of,
)
from minidist.pipeline_parallel.communication import add_communication, add_reductions
from minidist.pipeline_parallel.executor import NO_SUMS, Sums, execute
from minidist.pipeline_parallel.holders import check_alike, cut_of, shared_groups, take_over
from minidist.pipeline_parallel.reduction import OverlappedSums
from minidist.pipeline_parallel.schedules import order_of
from minidist.pipeline_parallel.stage import Stage

STAGES = "the stages of a pipeline: pass sum_squares=pipeline.sum_squares"


class Pipeline(Trainer):
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
        m = micro_batches_of(order) if micro_batches is None else micro_batches
        order = order if sums is None else add_reductions(order)
        self.programs = order if communicates(order) else add_communication(order, rendezvous_safe)
        placement, last = order.placement, last_stage(order.placement)
        self.cut = cut_of(len(model.layers), last + 1, cut)
        name = schedule
        if not isinstance(schedule, str):  # letters that are the same on every machine
            name = f"programs {crc32(repr((list(order), placement)).encode()):08x}"
        lengths = [len(part) for part in self.cut]
        description = f"{name}, {m} micro-batches, stages of {lengths} layers"
        same = check_alike(model, group, description, m, check_weights)
        shapes, loss = shapes_of(model), loss or model.loss
        self.stages = [
            Stage([model.layers[i] for i in self.cut[k]], k == 0, k == last, loss, recompute)
            for k in placement[group.rank]
        ]
        self.shared = shared_groups(model, self.cut, placement, group)
        layers = [layer for stage in self.stages for layer in stage.layers]
        super().__init__(take_over(model, layers, STAGES), group, shapes, same, m)
        self.batches = WholeBatches(self.drop, STAGES_SENT if communicates(self.programs) else "")
        self.sums: Sums = NO_SUMS
        if sums is not None:
            tied = {self.named_parameters()[name] for name in self.shared}
            self.sums = OverlappedSums(self.programs[group.rank], self.stages, tied, group, sums)

    @property
    def groups(self) -> list[Group]:
        """All groups that it communicates through, each with a ledger."""
        return [*super().groups, *self.shared.values()]

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return the whole loss.

        Every rank gets the batch. Inputs are needed only by the rank of the first stage, targets
        only by the rank of the last.
        """
        return self.total(self.run(self.micro_batches(batch)))

    def share(self, batch: Batch) -> Batch:
        return batch  # all of it, on every rank

    def run(self, batch: list[Batch]) -> Array:
        """Compute the gradient of a batch that is cut into micro-batches; return this rank's loss.

        The rank with the last stage returns the whole loss, the other ranks 0.
        """
        if len(batch) != self.m:
            raise WrongInput(f"the programs are for {self.m} micro-batches, not {len(batch)}")
        check_statistics(self.model, micro_batches=self.m, loads=True)  # as now: it may train again
        check_scale(self.model, batch[0])
        with self.batches.batch():
            before = self.take_shared_gradients()
            with self.sums.within():
                loss = self.run_program(self.programs[self.group.rank], batch)
            self.sum_shared_gradients(before)
            self.sums.finish()
        return loss

    def run_program(self, program: list[Action], batch: list[Batch]) -> Array:
        """Run a program of this rank on micro-batches; return its part of the loss."""
        for stage in self.stages:
            stage.begin(batch)
        execute(program, self.group, self.stages, self.sums)
        parts = (part for stage in self.stages for part in stage.losses.values())
        return np.array(sum(parts, start=0.0))

    def run_forward(self, batch: list[Batch]) -> Array:
        """Run the forward passes of the programs alone; return this rank's loss."""
        kinds = Forward | RecvActivation | SendActivation
        whole = self.programs[self.group.rank]
        program: list[Action] = [action for action in whole if isinstance(action, kinds)]
        with self.batches.forward_alone():
            loss = self.run_program(program, batch)
            for stage in self.stages:
                stage.begin([])
        return loss

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once.

        own  from Optimizer.clip_global_norm, this rank's own sum, used only as a check
        """
        return sum_squares_over(self.counted_here(), self.parameters(), own, self.group)

    def counted_here(self) -> list[nn.Parameter]:
        """Return this rank's parameters, except tied ones that an earlier rank counts."""
        named, shared = self.named_parameters(), self.shared
        return [p for name, p in named.items() if name not in shared or not shared[name].rank]

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return copies of whole arrays on the host, given what this rank has of parameters."""
        return from_holders(super().whole(own), self.shapes, self.group)

    def take_shared_gradients(self) -> dict[str, Array | None]:
        """Set the gradients of earlier batches aside: they have been summed already."""
        taken = {}
        for name in self.shared:
            p = self.named_parameters()[name]
            taken[name] = None if p.grad is None else p.grad.copy()
            p.grad = None
        return taken

    def sum_shared_gradients(self, before: dict[str, Array | None]) -> None:
        """Sum over the ranks what this batch has left; add what was set aside."""
        for name, earlier in before.items():
            p, group = self.named_parameters()[name], self.shared[name]
            sum_gradients([p], group)
            p.grad = p.grad if earlier is None else earlier + p.grad
