"""ZeRO stages 2 and 3 for layers on a mesh: several passes are in flight, and of several chunks.

zero.py has the idea, for one pass at a time. Here forward and backward of the micro-batches come in
any order, and layer k of a rank is one of any chunk:

    gradient   all layers write theirs into one buffer. So the layer that has it is summed before
               the next one begins its backward, of this micro-batch or of another, and at the end
    weights    stage 3 gathers a layer's before each of its passes, into two buffers in turn. What
               a forward pass keeps of them is a view: right again when backward has gathered them

A run of a layer has copies on some ranks (copies.py): experts on fewer than the rest of it.
"""

from collections.abc import Collection

import numpy as np

from minidist import nn
from minidist.data_parallel.copies import Copies, Runs, ShardedCopies
from minidist.data_parallel.layer_shard import LayerShard, load_shards
from minidist.data_parallel.zero_layers import Gatherer, ZeroLayer, gather_whole
from minidist.data_parallel.zero_memory import ZeroMemory
from minidist.nn.flat_parameters import FlatParameters
from minidist.nn.module import cast_state

ELSEWHERE = "each rank keeps its shard of it; use hybrid.state() and hybrid.load_state(state)"


class ShardedLayers(ShardedCopies):
    """Every rank keeps its shard of gradients and, in stage 3, of weights; a layer's come and go.

    runs      of all layers, and the ranks that have copies of each
    chunks    the layers of each of this rank's chunks, which are wrapped in place
    stage     2 or 3
    buffered  the layer whose gradient is in the buffer, or None
    """

    def __init__(
        self,
        runs: Runs,
        parameters: list[nn.Parameter],
        chunks: list[list[nn.Module]],
        stage: int,
        shards: int | None = None,
    ):
        self.stage = stage
        self.buffered: int | None = None
        flats = [layer.home for layers in chunks for layer in layers]
        self.memory = ZeroMemory(flats, stage)
        super().__init__(runs, parameters, shards)
        self.of_layer = [[s for s in self.shards if s.whole is flat] for flat in flats]
        self.gatherer = self.gather_from_shards(flats) if stage == 3 and self.shards else None
        self.chunk_of: list[range] = []  # of each layer: the numbers of its chunk's
        for layers in chunks:
            own = range(len(self.chunk_of), len(self.chunk_of) + len(layers))
            self.chunk_of += [own] * len(own)
            hooks = self.before_forward, self.before_backward
            layers[:] = [ZeroLayer(x, k, *hooks) for k, x in zip(own, layers, strict=True)]

    def keep(self, shard: LayerShard) -> None:
        """Let a shard have its own gradient, and in stage 3 its own weights."""
        if self.stage == 2:
            shard.part.bind(shard.run.data[shard.own])

    def gather_from_shards(self, flats: list[FlatParameters]) -> Gatherer:
        """Let all layers share two buffers for their weights; return what fills them."""
        apart = {group: group.split(0) for group in dict.fromkeys(s.group for s in self.shards)}
        self.groups += apart.values()
        for k, flat in enumerate(flats):
            flat.bind(self.memory.weights_of(k, flat))
            for p in flat.parameters:
                p.elsewhere = ELSEWHERE
        return Gatherer(self.of_layer, apart, gather_whole)

    def before_forward(self, k: int) -> None:
        self.need(k, k + 1)

    def before_backward(self, k: int) -> None:
        self.flush()
        self.buffered = k
        self.need(k, k - 1)

    def need(self, k: int, then: int) -> None:
        """Wait for layer k's weights; begin to gather those of layer `then`, if it is k's chunk's.

        Which chunk comes next, the layers do not know.
        """
        if self.gatherer is not None:
            self.gatherer.need(k, then if then in self.chunk_of[k] else -1)

    def flush(self) -> None:
        """Scatter the gradient that is in the buffer: the same order on all ranks of a stage."""
        if self.buffered is not None:
            shards = self.of_layer[self.buffered]
            for flat in dict.fromkeys(s.whole for s in shards):
                flat.collect_gradients()
            self.scatter(shards)
            self.buffered = None

    def sum_gradients(self, vectors: Collection[FlatParameters]) -> None:
        """End a batch: scatter zeros for what no pass has used, then sum the copies of shards."""
        self.scatter([s for s in self.shards if s.parameter.grad is None])
        self.sum_copies(self.shards)

    def load(self, model: nn.Module, state: dict[str, np.ndarray]) -> None:
        """Copy arrays by name into the parameters and, in stage 3, into their shards."""
        if self.gatherer is not None:
            self.gatherer.wait()  # it writes where `load_shards` does
        named = model.named_parameters()
        load_shards(self.shards, named, cast_state(named, state))


def copies_of(
    zero: int,
    runs: Runs,
    parameters: list[nn.Parameter],
    chunks: list[list[nn.Module]],
    shards: int | None = None,
) -> Copies | ShardedCopies:
    """Return what sums and updates what other ranks have copies of, by ZeRO's stage; 0: none."""
    if zero == 0:
        return Copies(runs, parameters)
    if zero == 1:
        return ShardedCopies(runs, parameters, shards)
    return ShardedLayers(runs, parameters, chunks, zero, shards)
