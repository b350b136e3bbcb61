"""A model cut into stages, trained under any synchronous schedule.

    pipeline = Pipeline(model, group, "1f1b", micro_batches=8)
    optimizer = optim.AdamW(pipeline.parameters(), lr=3e-4)             # of this rank's layers
    loss = pipeline.backward(inputs, targets)                           # the whole batch's
    optimizer.clip_global_norm(1.0, pipeline.sum_squares)
    optimizer.step(); optimizer.zero_grad()
    weights = pipeline.state()                                          # of the whole model

Layouts: rank r holds W of its stages; X[B/m, ...] and dX[B/m, ...] cross between neighbours. Bytes:
one micro-batch's activation per boundary and direction, all together 2 (S - 1) B T C itemsize.

A parameter that two stages share (a tied embedding, in the first and the last stage) gets a part of
its gradient on each of the two ranks; the parts are summed once, after the program.
"""

from collections.abc import Callable

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.pipeline_parallel.actions import last_stage
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.holders import from_holders, holders, load_own, shapes_of, take_over
from minidist.pipeline_parallel.micro_batch import MicroBatch, micro_batches
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.schedules import programs, updates
from minidist.pipeline_parallel.stage import Stage
from minidist.replicas import check_same_weights, sum_gradients, sum_squares_over

STAGES = "the stages of a pipeline: pass sum_squares=pipeline.sum_squares"


class Pipeline:
    """This rank's stages of a model, and the programs of all ranks.

    model            the whole model, the same on every rank; this rank's layers are taken over, so
                     ask the pipeline for the state
    schedule, micro_batches, chunks, options
                     as for `programs`
    cut              layers per virtual stage, as ranges (see partition.py), the same on every rank,
                     even if costs were measured; by default equal numbers of layers
    recompute        keep only the inputs of a stage (see Stage)
    rendezvous_safe  see `add_communication`
    loss             (outputs, targets, reduction_size=) -> a scalar tensor, on the last stage
    check_weights    whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        schedule: str = "1f1b",
        micro_batches: int = 4,
        chunks: int = 1,
        loss: Callable = nn.cross_entropy,
        cut: list[range] | None = None,
        recompute: bool = False,
        rendezvous_safe: bool = False,
        check_weights: bool = True,
        **options,
    ):
        self.group, self.m, self.loss = group, micro_batches, loss
        bare = programs(schedule, group.size, micro_batches, chunks, **options)
        if updates(bare):
            raise ValueError(
                f"{schedule} updates the weights itself, stage by stage; use PipeDream"
            )
        self.programs = add_communication(bare, rendezvous_safe)
        placement, last = bare.placement, last_stage(bare.placement)
        self.cut = cut_of(len(model.layers), last + 1, cut)
        lengths = [len(part) for part in self.cut]
        group.barrier(
            label=f"{schedule}, {micro_batches} micro-batches, stages of {lengths} layers"
        )
        self.check_group = group if check_weights else None
        if check_weights:
            check_same_weights(model, group)
        self.shapes = shapes_of(model)
        self.stages = [
            Stage([model.layers[i] for i in self.cut[k]], k == 0, k == last, loss, recompute)
            for k in placement[group.rank]
        ]
        self.shared = {}  # {parameter: the group of the ranks that share it, on those}
        for name, stages in holders(model, self.cut).items():
            ranks = {r for r, own in enumerate(placement) if set(own) & set(stages)}
            if len(ranks) > 1 and model.named_parameters()[name].requires_grad:
                self.shared[name] = group.split(0 if group.rank in ranks else None)
        layers = [layer for stage in self.stages for layer in stage.layers]
        self.model = take_over(model, layers, STAGES)

    def parameters(self) -> list[nn.Parameter]:
        return self.model.parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.model.named_parameters()

    def backward(
        self, inputs: Tensor | Array, targets: Array, seed: int = 0, step: int = 0, examples=None
    ) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return this rank's loss.

        The rank with the last stage returns the whole loss, the other ranks 0.

        Every rank gets the batch. Inputs are needed only by the rank of the first stage, targets
        only by the rank of the last. See `micro_batches` for the other arguments.
        """
        return self.run(micro_batches(inputs, targets, self.m, seed, step, examples))

    def run(self, batch: list[MicroBatch]) -> float:
        """The same, for micro-batches that are cut already."""
        if len(batch) != self.m:
            raise ValueError(f"the programs are for {self.m} micro-batches, not {len(batch)}")
        for stage in self.stages:
            stage.begin(batch)
        before = self.take_shared_gradients()
        execute(self.programs[self.group.rank], self.group, self.stages)
        self.sum_shared_gradients(before)
        return sum((part for stage in self.stages for part in stage.losses.values()), start=0.0)

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

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""
        return from_holders(self.model.state(), self.shapes, self.group)

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
            p = self.named_parameters()[name]
            sum_gradients([p], self.shared[name])
            p.grad = p.grad if earlier is None else earlier + p.grad
