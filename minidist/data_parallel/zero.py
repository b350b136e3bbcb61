"""ZeRO: data parallelism in which every rank keeps a different part, in three stages.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
sections 5 (what is cut) and 7 (what it moves). Letters: N ranks, r this one, S bytes of parameters,
m micro-batches. Each layer's flat vector is cut into N parts, as equal as can be; the r-th part,
its gradient and its optimizer state are rank r's shard.

    stage   kept whole              kept 1/N            bytes from each rank per step
    0       W, dW, Adam's moments                       2 S (N-1)/N        (all_reduce)
    1       W, dW                   moments             2 S (N-1)/N
    2       W                       dW, moments         (m + 1) S (N-1)/N
    3                               W, dW, moments      3 m S (N-1)/N

A step: a reduce_scatter gives every rank the sum of its part of the gradient; its optimizer updates
its part of the weights; an all_gather gives every rank the new weights. The two collectives move as
much as one all_reduce.

    stage 2   A layer's gradient is reduced as soon as backward leaves the layer; the next layer
              then writes its gradient into the same memory.
    stage 3   A layer's weights are gathered just before they are used, in forward and again in
              backward, into two buffers in turn: one is filled while the other is used.
"""

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import host_copy
from minidist.comm import Group
from minidist.data_parallel import zero_checks
from minidist.data_parallel.hierarchical_zero import sum_copies, two_levels
from minidist.data_parallel.layer_shard import ONLY_STEP, LayerShard, load_shards, unlocked
from minidist.data_parallel.quantized_gather import gather_in
from minidist.data_parallel.zero_layers import Gatherer, ZeroLayer
from minidist.data_parallel.zero_memory import ZeroMemory
from minidist.datasets import Batch
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.nn.module import cast_state
from minidist.replicas import check_replicas, check_same_state
from minidist.trainer import AnyOptimizer, WholeBatches, loss_of

ELSEWHERE = "each rank keeps its shard of it; use zero.state() and zero.load_state(state)"


class Zero:
    """This rank's share of a model that all ranks of a group train on different examples.

        zero = Zero(model.flatten(group.empty), group, stage=2, micro_batches=M)
        optimizer = optim.AdamW(zero.parameters(), lr=3e-4)          # of this rank's shards
        zero.backward(Batch(inputs, targets))                        # M times zero.accumulate(loss)
        optimizer.clip_global_norm(1.0, zero.sum_squares)
        zero.step(optimizer)
        weights = zero.state()                                       # stage 3: not model.state()

    model   the same on every rank; flatten(group.empty) lets its vectors move without a copy.
            Stages 2 and 3 wrap each of its layers.
    stage   1, 2 or 3
    shards  how many neighbours share one copy of what is cut, by default all; the other ranks keep
            further copies, and sum over them with a step's last micro-batch (hierarchical_zero.py)
    block   in stage 3: weights travel as int8, and this many share a scale (quantized_gather.py)
    check_weights
            whether the ranks first compare their weights (see check_same_weights)
    micro_batches
            of each rank's share of a batch, for `backward`
    groups  all groups that it communicates through, each with a ledger
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        stage: int = 1,
        shards: int | None = None,
        check_weights: bool = True,
        micro_batches: int = 1,
        block: int | None = None,
    ):
        tied = zero_checks.tied_between_layers(model)
        zero_checks.check_stage(model, stage, tied, block)
        self.check_group = check_replicas(model, group, check_weights, micro_batches=micro_batches)
        self.model, self.stage, self.m = model, stage, micro_batches
        self.split = [p.name for p in model.parameters() if p.spread]  # by another strategy, too
        self.place = group.rank, group.size
        self.shard_group, self.copies = two_levels(group, shards)
        self.groups = [self.shard_group, self.copies]
        self.next: int | None = None  # layer to reduce next, from the last one down: in backward
        flats = zero_checks.flat_vectors(model)
        self.memory = ZeroMemory(flats, stage)
        self.shards = [self._cut(k, flat) for k, flat in enumerate(flats)]
        self.batches = WholeBatches(model, self.parameters())
        self.gatherer = None
        if stage == 3:
            apart = {self.shard_group: self.shard_group.split(0)}
            self.gatherer = Gatherer([[s] for s in self.shards], apart, gather_in(block))
            self.groups += apart.values()
        if stage > 1:
            for p in tied:
                p.grad_buffer = None  # complete only when the first of its layers is
            assert isinstance(model, nn.Sequential)  # or check_stage has refused it
            hooks = self._before_forward, self._before_backward
            model.sequence[:] = [ZeroLayer(x, k, *hooks) for k, x in enumerate(model.layers)]

    def _cut(self, k: int, flat: FlatParameters) -> LayerShard:
        """Return this rank's part of layer k; release what is not kept whole."""
        shard = LayerShard(FlatSlice(flat, 0, flat.size), f"shard of layer {k}", self.shard_group)
        flat.locked = ONLY_STEP
        for p in flat.parameters:
            p.spread = shard.parameter.spread
        if self.stage == 1:
            shard.part.bind(flat.vector[shard.own], flat.gradient[shard.own])
        elif self.stage == 2:
            shard.part.bind(flat.vector[shard.own])
        else:
            flat.bind(self.memory.weights_of(k, flat))
            for p in flat.parameters:
                p.elsewhere = ELSEWHERE
        return shard

    def parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates: its shard of every layer."""
        return [s.parameter for s in self.shards]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.model.named_parameters()

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in the shards; return its loss."""
        total, mine = 0.0, batch.share(*self.place)
        for i, part in enumerate(mine.micro_batches(self.m), 1):
            loss = loss_of(self.model, part)
            self.accumulate(loss, last=i == self.m)
            total += loss.item()
        return float(self.copies.all_reduce(self.shard_group.all_reduce(np.array(total))))

    def accumulate(self, loss: Tensor, last: bool = True) -> None:
        """Add a micro-batch's gradient, summed over the ranks, to the shards.

        loss  the loss of one pass through the model
        last  whether this is the step's last micro-batch; stage 1 sums whole gradients until then,
              and copies of the shards are summed then; after an error begin the step again
        """
        zero_checks.check_not_reduced(self.model, self.shards, self.stage, self.place[1])
        with self.batches.batch():
            self.next = len(self.shards) - 1
            loss.backward()
            self._sample()
            if last or self.stage > 1:
                self.reduce_above(-1)
            if last:
                sum_copies(self.shards, self.copies)
            self.next = None

    def _before_forward(self, k: int) -> None:
        if self.gatherer is not None:
            self.gatherer.need(k, then=k + 1)

    def _before_backward(self, k: int) -> None:
        zero_checks.check_order(k, self.next)
        self._sample()
        self.reduce_above(k)
        if self.gatherer is not None:
            self.gatherer.need(k, then=k - 1)

    def reduce_above(self, k: int) -> None:
        """Reduce the layers after layer k, last one first: the same order on all ranks."""
        assert self.next is not None
        for number in range(self.next, k, -1):
            s, label = self.shards[number], f"gradient of layer {number}"
            for p, place in zip(s.whole.parameters, s.whole.views(s.whole.gradient), strict=True):
                if p.grad is None or p.grad is not p.grad_buffer:  # unused, or tied
                    place[...] = 0 if p.grad is None else p.grad
                p.grad = None
            piece = self.shard_group.reduce_scatter(s.whole.gradient, label=label)
            s.parameter.accumulate(piece)
        self.next = min(self.next, k)

    def sum_squares(self, own: float) -> float:
        """Add up the squares of all shards; pass this to Optimizer.clip_global_norm."""
        zero_checks.check_not_split(self.split)
        zero_checks.check_reduced(self.shards)
        return float(self.shard_group.all_reduce(np.array(own)))

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update this rank's shards; give every rank the new weights.

        optimizer  of `zero.parameters()`; its own `step` is refused: it would not tell the others
        """
        self.batches.check()
        with unlocked(self.shards, self.model.parameters(), optimizer):
            self.update_shards(optimizer)

    def update_shards(self, optimizer: AnyOptimizer) -> None:
        """Do what `step` does, once it has checked the optimizer and unlocked the shards."""
        zero_checks.check_reduced(self.shards)
        if self.gatherer is not None:
            self.gatherer.wait()  # weights that were gathered early are old after the update
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for k, s in enumerate(self.shards):
                s.group.all_gather(s.parameter.data, out=s.whole.vector, label=f"layer {k}")

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all weights by name, on every rank and on the host."""
        if self.stage < 3:
            return self.model.state()
        result = {name: p.data for name, p in self.model.named_parameters().items()}
        for k, s in enumerate(self.shards):
            whole = s.whole.views(self.shard_group.all_gather(s.parameter.data, label=f"layer {k}"))
            result |= {p.name: w for p, w in zip(s.whole.parameters, whole, strict=True)}
        return {name: host_copy(array) for name, array in result.items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy global arrays by name, the same on every rank, into all weights.

        The optimizer's state does not change. The errors are the same as in `Module.load_state`.
        """
        named = self.model.named_parameters()
        new = cast_state(named, state)
        if self.check_group is not None:
            check_same_state(state, self.check_group)
        if self.gatherer is not None:
            self.gatherer.wait()  # weights that were gathered early are old after the load
        load_shards(self.shards, named, new)

    def _sample(self) -> None:
        self.memory.sample(self.model.parameters(), self.shards)

    @property
    def peak(self) -> int:
        """The most bytes of weights and gradients, whole and in shards: see zero_memory.py."""
        return self.memory.peak
