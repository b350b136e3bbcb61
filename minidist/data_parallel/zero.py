"""ZeRO: data parallelism in which no two ranks keep the same thing, in three stages.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
section 5. Letters: N ranks, r this one, P bytes of parameters. Each layer's flat vector is cut into
N parts, as equal as can be; the r-th part, its gradient and its optimizer state are rank r's shard.

    stage   kept whole              kept 1/N                        bytes from each rank per step
    0       W, dW, Adam's m and v                                   2 P (N-1)/N   (all_reduce)
    1       W, dW                   m, v                            2 P (N-1)/N
    2       W                       dW, m, v                        2 P (N-1)/N
    3                               W, dW, m, v                     3 P (N-1)/N

A step: every rank's gradient is reduce_scattered, so that each gets the sum of its shard; its
optimizer updates the shard; an all_gather gives everyone the new weights. Stage 2 reduces a layer's
gradient as soon as backward has it, and drops it. Stage 3 keeps no weights either: it gathers a
layer's just before they are used, forward and again backward, into one of two places in turn, while
the layer before computes.

    zero = Zero(model.flatten(group.empty), group, stage=2)
    optimizer = optim.AdamW(zero.parameters(), lr=3e-4)          # of this rank's shard
    zero.backward(loss)                                          # once per micro-batch
    optimizer.clip_global_norm(1.0, zero.sum_squares)
    zero.step(optimizer)
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.comm.collectives import split_ends
from minidist.nn.flat_parameters import FlatParameters
from minidist.optim import Optimizer
from minidist.rng import Randomness


class Shard:
    """What this rank keeps of a layer: a part of its flat vector, as a parameter of its own."""

    def __init__(self, layer: nn.Module, number: int, group: Group):
        self.flat = layer.flat
        ends = split_ends(self.flat.size, group.size)
        self.own = slice(ends[group.rank], ends[group.rank + 1])
        self.parameter = nn.Parameter(self.flat.vector[self.own], f"shard of layer {number}")
        self.home = FlatParameters([self.parameter])

    def add(self, gradient: Array) -> None:
        p = self.parameter
        p.grad_buffer[...] = gradient if p.grad is None else p.grad + gradient
        p.grad = p.grad_buffer


class Zero:
    """This rank's share of a model that all ranks of a group train on different examples.

    model   the same on every rank; flatten(group.empty) lets its vectors move without a copy
    stage   1, 2 or 3
    shards  ranks that share one copy of what is cut; the others keep copies of it, in such groups
            too; by default all ranks. It divides their number.
    groups  all that it communicates through, each with a ledger
    peak    bytes of weights and gradients, whole and shards, that were alive at most
    """

    def __init__(self, model: nn.Sequential, group: Group, stage: int = 1, shards=None):
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
        shards = group.size if shards is None else shards
        if group.size % shards:
            raise ValueError(f"groups of {shards} shards do not make up {group.size} ranks")
        self.model, self.stage, self.peak = model, stage, 0
        self.group = group.split(group.rank // shards)  # one copy, cut
        self.copies = group.split(group.rank % shards)  # ranks with the same shard
        self.everyone = group
        self.layers = list(model.layers)
        self.shards = [Shard(layer, i, self.group) for i, layer in enumerate(self.layers)]
        self.groups = [self.group, self.copies]
        self.missing: list[int] | None = None  # gradients to come per layer, while backward runs
        if stage == 1:
            for s in self.shards:
                s.home.bind(s.flat.vector[s.own], s.flat.gradient[s.own])
        else:
            self._drop_gradients()
        if stage == 2:
            for s in self.shards:
                s.home.bind(s.flat.vector[s.own])
        if stage == 3:
            self.gatherer = Gatherer(self)
            self.groups.append(self.gatherer.beside)

    def _drop_gradients(self) -> None:
        """Keep one place for a whole gradient, of any layer, instead of one for each."""
        most = max(s.flat.size for s in self.shards)
        self.scratch = self.everyone.empty(most, self.shards[0].flat.vector.dtype)
        for k, s in enumerate(self.shards):
            s.flat.gradient = self.scratch[: s.flat.size]
            for p in s.flat.parameters:
                p.grad_buffer = None
                p.add_hook(partial(self._arrived, k))

    def parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates: its shard of every layer."""
        return [s.parameter for s in self.shards]

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add a micro-batch's gradient, summed over the ranks, to the shards.

        last  whether it is the last one of a step: stage 1 adds up whole gradients until then
        """
        self.missing = [len(s.flat.parameters) for s in self.shards]
        self.next = len(self.shards) - 1
        loss.backward()
        if last or self.stage > 1:
            while self.next >= 0:  # stage 1: all; else those with parameters that were not used
                self._reduce_next()
        self.missing = None

    def _arrived(self, k: int, parameter: nn.Parameter) -> None:
        """Reduce the layers whose turn it is, the last one first, on all ranks alike."""
        if self.missing is None:
            return
        self.missing[k] -= 1
        self._sample()
        while self.next >= 0 and self.missing[self.next] == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        k, self.next = self.next, self.next - 1
        flat = self.shards[k].flat
        for p, place in zip(flat.parameters, flat.views(flat.gradient), strict=True):
            if p.grad is not p.grad_buffer or p.grad is None:
                place[...] = 0 if p.grad is None else p.grad
            p.grad = None
        piece = self.group.reduce_scatter(flat.gradient, label=f"gradient of layer {k}")
        if self.copies.size > 1:
            piece = self.copies.all_reduce(piece, label=f"gradient of layer {k}")
        self.shards[k].add(piece)

    def sum_squares(self, own: float) -> float:
        """Add up over the shards; for Optimizer.clip_global_norm."""
        return float(self.group.all_reduce(np.array(own)))

    def step(self, optimizer: Optimizer) -> None:
        """Update this rank's shards; give everyone the new weights."""
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for k, s in enumerate(self.shards):
                self.group.all_gather(s.parameter.data, out=s.flat.vector, label=f"layer {k}")

    def state(self) -> dict[str, np.ndarray]:
        """Return all weights by name, on every rank."""
        if self.stage < 3:
            return self.model.state()
        result = {name: p.data for name, p in self.model.named_parameters().items()}
        for k, s in enumerate(self.shards):
            whole = self.group.all_gather(s.parameter.data, label=f"layer {k}")
            result |= {
                p.name: w for p, w in zip(s.flat.parameters, s.flat.views(whole), strict=True)
            }
        return {name: array.copy() for name, array in result.items()}

    def _sample(self) -> None:
        """Note the bytes of weights and gradients that are alive."""
        named = self.model.parameters()
        alive = [p.grad for p in named if p.grad is not None and p.grad is not p.grad_buffer]
        for s in self.shards:
            alive += [s.home.vector, s.home.gradient] if self.stage == 3 else [s.flat.vector]
            alive += [s.home.gradient] if self.stage == 2 else []
            alive += [s.flat.gradient] if self.stage == 1 else []
        alive += [self.scratch] if self.stage > 1 else []
        alive += self.gatherer.places if self.stage == 3 else []
        self.peak = max(self.peak, sum(array.nbytes for array in alive))


class Gatherer:
    """Stage 3: two places in turn for the weights of all layers, filled just before use.

    Layer k's parameters are views of place k mod 2, for good; what changes is what lies there. A
    graph that was built on them is right again when the layer has been gathered again.
    """

    def __init__(self, zero: Zero):
        self.group, self.beside = zero.group, zero.group.split(0)  # one for the other thread
        self.shards, self.sample = zero.shards, zero._sample
        tied = {p.name for layer in zero.layers for p in layer.parameters()}
        if len(tied) < sum(len(layer.named_parameters()) for layer in zero.layers):
            raise ValueError(
                "stage 3 cannot free a layer whose parameters another layer uses, too; "
                "use a model whose weights are not tied"
            )
        most = max(s.flat.size for s in self.shards)
        dtype = self.shards[0].flat.vector.dtype
        self.places = [zero.everyone.empty(most, dtype) for _ in range(2)]
        for k, s in enumerate(self.shards):
            s.flat.bind(self.places[k % 2][: s.flat.size])
            for p in s.flat.parameters:
                p.grad_buffer = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="gather")
        self.coming: tuple[int, Future] | None = None
        zero.model.sequence[:] = [
            GatheredLayer(layer, k, self) for k, layer in enumerate(zero.layers)
        ]

    def need(self, k: int, then: int) -> None:
        """Wait for the weights of layer k; let those of layer `then` come meanwhile."""
        if self.coming is None or self.coming[0] != k:
            self.coming = k, self.thread.submit(self._gather, k)
        with self.group.waiting(f"the weights of layer {k}"):
            self.coming[1].result()
        self.coming = None
        if 0 <= then < len(self.shards):
            self.coming = then, self.thread.submit(self._gather, then)
        self.sample()

    def _gather(self, k: int) -> None:
        s = self.shards[k]
        self.beside.all_gather(s.parameter.data, out=s.flat.vector, label=f"layer {k}")


class GatheredLayer(nn.Module):
    """A layer whose weights come just before its forward, and again before its backward."""

    def __init__(self, layer: nn.Module, number: int, gatherer: Gatherer):
        self.layer, self.flat, self.number = layer, layer.flat, number
        self.gatherer = gatherer

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.gatherer.need(self.number, self.number + 1)
        return GatherAgain(self.number, self.gatherer)(self.layer(x, randomness))


class GatherAgain(Function):
    """Y = X  =>  dX = dY, and the weights of the layer behind which it stands are there again."""

    def __init__(self, number: int, gatherer: Gatherer):
        self.number, self.gatherer = number, gatherer

    def forward(self, x):
        return x

    def backward(self, grad):
        self.gatherer.need(self.number, self.number - 1)
        return grad
