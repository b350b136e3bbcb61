"""ZeRO: data parallelism in which no two ranks keep the same thing, in three stages.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
sections 5 (what is cut) and 7 (what it moves). Letters: N ranks, r this one, P bytes of parameters,
M micro-batches. Each layer's flat vector is cut into N parts, as equal as can be; the r-th part,
its gradient and its optimizer state are rank r's shard.

    stage   kept whole              kept 1/N            bytes from each rank per step
    0       W, dW, Adam's m and v                       2 P (N-1)/N        (all_reduce)
    1       W, dW                   m, v                2 P (N-1)/N
    2       W                       dW, m, v            (M + 1) P (N-1)/N
    3                               W, dW, m, v         3 M P (N-1)/N

A step: a reduce_scatter gives every rank the sum of its part of the gradient; its optimizer updates
its part of the weights; an all_gather gives everyone the new ones. Both together are an all_reduce.

    stage 2   A layer's gradient is reduced as soon as backward leaves the layer, and its place is
              that of the next layer's.
    stage 3   A layer's weights are gathered just before they are used, forward and again backward,
              into one of two places in turn, while the layer before computes with the other.
"""

import threading
from collections import Counter

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.backend import Array, on_gpu, to_host
from minidist.comm import Group
from minidist.comm.collectives import split_ends
from minidist.nn.flat_parameters import FlatParameters
from minidist.nn.module import cast_state
from minidist.optim import Optimizer
from minidist.replicas import check_same_state, check_same_weights
from minidist.rng import Randomness

ONLY_ZERO = "these are shards: call zero.step(optimizer), which gives all ranks the new weights"
ELSEWHERE = "each rank keeps its shard of it; use zero.state() and zero.load_state(state)"


class LayerShard:
    """What this rank keeps of a layer: a part of its flat vector, as a parameter of its own."""

    def __init__(self, flat: FlatParameters, number: int, group: Group):
        ends = split_ends(flat.size, group.size)
        self.flat, self.own = flat, slice(ends[group.rank], ends[group.rank + 1])
        self.parameter = nn.Parameter(flat.vector[self.own], f"shard of layer {number}")
        self.parameter.spread = "ZeRO's shards: pass sum_squares=zero.sum_squares"
        self.home = FlatParameters([self.parameter])  # copies
        self.home.locked = ONLY_ZERO


class Zero:
    """This rank's share of a model that all ranks of a group train on different examples.

        zero = Zero(model.flatten(group.empty), group, stage=2)
        optimizer = optim.AdamW(zero.parameters(), lr=3e-4)          # of this rank's shards
        for i, (x, y) in enumerate(micro_batches):
            zero.backward(loss(x, y), last=i == len(micro_batches) - 1)
        optimizer.clip_global_norm(1.0, zero.sum_squares)
        zero.step(optimizer)
        weights = zero.state()                                       # stage 3: not model.state()

    model   the same on every rank; flatten(group.empty) lets its vectors move without a copy.
            Stages 2 and 3 put something around each of its layers.
    stage   1, 2 or 3
    shards  ranks that share one copy of what is cut, by default all; others keep copies of it
    check_weights
            whether the ranks compare their weights at first (see check_same_weights)
    groups  all that it communicates through, each with a ledger
    places  bytes for one layer each: its gradient (stages 2 and 3), and twice its weights (3)
    peak    bytes of weights and gradients that were alive at most, whole ones and shards, at the
            boundaries of layers; optimizer state and frozen parameters do not count
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        stage: int = 1,
        shards: int | None = None,
        check_weights: bool = True,
    ):
        shards = group.size if shards is None else shards
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
        if stage > 1 and not isinstance(model, nn.Sequential):
            raise ValueError(f"stage {stage} needs an nn.Sequential, not {type(model).__name__}")
        if shards < 1 or group.size % shards:
            raise ValueError(f"groups of {shards} shards do not make up {group.size} ranks")
        layers = list(model.layers)
        users = Counter(p for layer in layers for p in layer.parameters())
        tied = [p for p, layers_of_it in users.items() if layers_of_it > 1]
        if stage == 3 and tied:
            raise ValueError(
                f"{tied[0].name!r} belongs to several layers, and stage 3 keeps the weights "
                "of one layer at a time; use a model that is not tied, or stage 2"
            )
        if check_weights:
            check_same_weights(model, group)
        self.model, self.stage, self.peak = model, stage, 0
        self.check_group = group if check_weights else None
        self.split = [
            p.name for p in model.parameters() if p.spread
        ]  # over others than these ranks
        self.group = group.split(group.rank // shards)  # one copy, cut
        self.copies = group.split(group.rank % shards)  # ranks with the same shard
        self.groups = [self.group, self.copies]
        self.next: int | None = None  # layer to reduce next, from the last one down: in backward
        flats = [layer.flat for layer in layers]
        most = max(flat.vector.nbytes for flat in flats)
        self.places = [flats[0].empty((most,), "uint8") for _ in range({1: 0, 2: 1, 3: 3}[stage])]
        for flat in flats if stage > 1 else []:
            flat.bind(flat.vector, as_vector(self.places[0], flat))
        self.shards = [self._cut(k, flat) for k, flat in enumerate(flats)]
        for p in tied if stage > 1 else []:
            p.grad_buffer = None  # complete only when the first of its layers is
        self.gatherer = None
        if stage == 3:
            self.gatherer = Gatherer(self.shards, self.group.split(0))
            self.groups.append(self.gatherer.group)
        if stage > 1:
            model.sequence[:] = [ZeroLayer(layer, k, self) for k, layer in enumerate(layers)]

    def _cut(self, k: int, flat: FlatParameters) -> LayerShard:
        """Return this rank's part of layer k, and let go of what is not kept whole."""
        shard = LayerShard(flat, k, self.group)
        flat.locked = ONLY_ZERO
        for p in flat.parameters:
            p.spread = shard.parameter.spread
        if self.stage == 1:
            shard.home.bind(flat.vector[shard.own], flat.gradient[shard.own])
        elif self.stage == 2:
            shard.home.bind(flat.vector[shard.own])
        else:
            flat.bind(as_vector(self.places[1 + k % 2], flat))
            for p in flat.parameters:
                p.elsewhere = ELSEWHERE
        return shard

    def parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates: its shard of every layer."""
        return [s.parameter for s in self.shards]

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add a micro-batch's gradient, summed over the ranks, to the shards.

        loss  of one pass through the model
        last  whether it is the last one of a step: stage 1 adds up whole gradients until then
        """
        if self.stage == 1 and self.shards[0].parameter.grad is not None:
            raise ValueError("this step's gradient is reduced already; say last=False before")
        for s in self.shards:
            s.flat.check_home()
        self.next = len(self.shards) - 1
        loss.backward()
        self._sample()
        if last or self.stage > 1:
            self.reduce_above(-1)
        self.next = None

    def _before_forward(self, k: int) -> None:
        if self.gatherer is not None:
            self.gatherer.need(k, then=k + 1)

    def _before_backward(self, k: int) -> None:
        if self.next is None:
            raise ValueError("gradients stay whole with loss.backward(); use zero.backward(loss)")
        if k > self.next:
            raise ValueError(
                f"layer {k} is met again after its gradient was reduced; "
                "give zero.backward the loss of one pass through the model"
            )
        self._sample()
        self.reduce_above(k)
        if self.gatherer is not None:
            self.gatherer.need(k, then=k - 1)

    def reduce_above(self, k: int) -> None:
        """Reduce the layers after layer k, last one first: the same order on all ranks."""
        for number in range(self.next, k, -1):
            s, label = self.shards[number], f"gradient of layer {number}"
            for p, place in zip(s.flat.parameters, s.flat.views(s.flat.gradient), strict=True):
                if p.grad is None or p.grad is not p.grad_buffer:  # unused, or tied
                    place[...] = 0 if p.grad is None else p.grad
                p.grad = None
            piece = self.group.reduce_scatter(s.flat.gradient, label=label)
            if self.copies.size > 1:
                piece = self.copies.all_reduce(piece, label=label)
            s.parameter.accumulate(piece)
        self.next = min(self.next, k)

    def sum_squares(self, own: float) -> float:
        """Add up over the shards; for Optimizer.clip_global_norm."""
        if self.split:
            raise ValueError(
                f"{self.split[0]} is split over other ranks too, and zero.sum_squares adds up over "
                "the shards only; use ZeRO on a whole model, or do not clip"
            )
        self._check_reduced()
        return float(self.group.all_reduce(np.array(own)))

    def step(self, optimizer: Optimizer) -> None:
        """Update this rank's shards; give everyone the new weights.

        optimizer  of `zero.parameters()`; its own `step` is refused, which would tell nobody
        """
        if missing := {s.parameter for s in self.shards} - set(optimizer.parameters):
            raise ValueError(
                f"the optimizer lacks the {missing.pop().name}; "
                "make it of zero.parameters(), not of the model's"
            )
        for s in self.shards:
            s.flat.check_home()
            s.home.locked = None
        try:
            self.update_shards(optimizer)
        finally:
            for s in self.shards:
                s.home.locked = ONLY_ZERO
        for s in self.shards:
            s.flat.changed()

    def _check_reduced(self) -> None:
        if any(s.parameter.grad is None for s in self.shards):
            raise ValueError("no gradient has been reduced; call zero.backward(loss) before")

    def update_shards(self, optimizer: Optimizer) -> None:
        """Do what `step` does, once it has checked the optimizer and unlocked the shards."""
        self._check_reduced()
        if self.gatherer is not None:
            self.gatherer.wait()  # what came early, and nobody has used, is of old weights
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for k, s in enumerate(self.shards):
                self.group.all_gather(s.parameter.data, out=s.flat.vector, label=f"layer {k}")

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all weights by name, on every rank and on the host."""
        if self.stage < 3:
            return self.model.state()
        result = {name: p.data for name, p in self.model.named_parameters().items()}
        for k, s in enumerate(self.shards):
            whole = s.flat.views(self.group.all_gather(s.parameter.data, label=f"layer {k}"))
            result |= {p.name: w for p, w in zip(s.flat.parameters, whole, strict=True)}
        return {name: to_host(array.copy()) for name, array in result.items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy global arrays by name, the same on every rank, into all weights.

        The optimizer's state does not change. The errors are the same as in `Module.load_state`.
        """
        named = self.model.named_parameters()
        new = cast_state(named, state)
        if self.check_group is not None:
            check_same_state(state, self.check_group)
        if self.gatherer is not None:
            self.gatherer.wait()  # what comes early is of old weights
        for s in self.shards:
            s.flat.check_home()
            s.flat.changed()
            for p, place in zip(s.flat.parameters, s.flat.views(s.flat.vector), strict=True):
                place[...] = new.pop(p.name)
            s.parameter.data[...] = s.flat.vector[s.own]
        for name, array in new.items():  # of those that are frozen
            named[name].data[...] = array

    def _sample(self) -> None:
        """Note the bytes of weights and gradients that are alive, each counted once."""
        homes = [home for s in self.shards for home in (s.flat, s.home)]
        alive = [array for home in homes for array in (home.vector, home.gradient)]
        alive += [p.grad for p in self.model.parameters() if p.grad is not None] + self.places
        starts = [a.data.ptr if on_gpu(a) else a.ctypes.data for a in alive]
        total = end = 0
        for start, array in sorted(zip(starts, alive, strict=True), key=lambda pair: pair[0]):
            total += max(0, start + array.nbytes - max(start, end))
            end = max(end, start + array.nbytes)
        self.peak = max(self.peak, total)


def as_vector(place: Array, flat: FlatParameters) -> Array:
    """Return the beginning of a place, which is bytes, as a flat vector of this layer's size."""
    return place[: flat.vector.nbytes].view(flat.vector.dtype)


class Gatherer:
    """Stage 3: the weights of each layer come just before use, into one of two places in turn.

    Layer k's parameters are views of place 1 + k mod 2, for good; what changes is what lies there.
    A graph that was built on them is right again when the layer has been gathered again.
    """

    def __init__(self, shards: list[LayerShard], group: Group):
        self.shards, self.group = shards, group
        self.coming: int | None = None  # the layer whose weights a second thread gathers
        self.thread = self.error = None

    def need(self, k: int, then: int) -> None:
        """Return when the weights of layer k are there; let those of layer `then` come."""
        if self.wait() != k:
            self.gather(k)
        if 0 <= then < len(self.shards):
            self.coming = then
            self.thread = threading.Thread(
                target=self._gather_beside, args=(then,), name="gather", daemon=True
            )
            self.thread.start()

    def wait(self) -> int | None:
        """Wait for the layer that is coming; return its number, or None if there is none."""
        came, self.coming = self.coming, None
        if came is not None:
            with self.group.waiting(f"the weights of layer {came}", self.thread):
                self.thread.join()
            if self.error is not None:
                raise self.error
        return came

    def _gather_beside(self, k: int) -> None:
        try:
            self.gather(k)
        except BaseException as raised:  # the first thread raises it
            self.error = raised

    def gather(self, k: int) -> None:
        """Fill layer k's flat vector with every rank's shard."""
        s = self.shards[k]
        self.group.all_gather(s.parameter.data, out=s.flat.vector, label=f"layer {k}")


class ZeroLayer(nn.Module):
    """A layer that says when its forward is about to begin, and when its backward is."""

    def __init__(self, layer: nn.Module, number: int, zero: Zero):
        self.layer, self.flat, self.number, self.zero = layer, layer.flat, number, zero

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.zero._before_forward(self.number)
        return BeforeBackward(self.number, self.zero)(self.layer(x, randomness))


class BeforeBackward(Function):
    """Y = X  =>  dX = dY.  All layers after this one have their gradients when dY comes."""

    def __init__(self, number: int, zero: Zero):
        self.number, self.zero = number, zero

    def forward(self, x):
        return x

    def backward(self, grad):
        self.zero._before_backward(self.number)
        return grad
