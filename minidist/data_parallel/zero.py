"""ZeRO: data parallelism in which every rank keeps a different part, in three stages.

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
its part of the weights; an all_gather gives every rank the new weights. The two collectives move as
much as one all_reduce.

    stage 2   A layer's gradient is reduced as soon as backward leaves the layer; the next layer
              then writes its gradient into the same memory.
    stage 3   A layer's weights are gathered just before they are used, in forward and again in
              backward, into two buffers in turn: one is filled while the other is used.
"""

from collections import Counter

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.backend import Array, address, host_copy
from minidist.comm import Group
from minidist.data_parallel.layer_shard import ONLY_STEP, LayerShard, unlocked
from minidist.nn.flat_parameters import FlatParameters, FlatSlice
from minidist.nn.module import cast_state
from minidist.optim import Optimizer
from minidist.replicas import check_batch_norm, check_same_state, check_same_weights
from minidist.rng import Randomness

ELSEWHERE = "each rank keeps its shard of it; use zero.state() and zero.load_state(state)"


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
            Stages 2 and 3 wrap each of its layers.
    stage   1, 2 or 3
    shards  how many ranks share one copy of what is cut, by default all; the other ranks keep
            further copies
    check_weights
            whether the ranks first compare their weights (see check_same_weights)
    groups  all groups that it communicates through, each with a ledger
    places  buffers, each as large as the largest layer: one for gradients (stages 2 and 3), two
            for weights (stage 3)
    peak    the most bytes of weights and gradients alive at once, whole ones and shards, seen at
            the boundaries of layers; optimizer state and frozen parameters do not count
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
        check_batch_norm(model, group.size)
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
        largest = max(flats, key=lambda flat: flat.vector.nbytes)
        gradients = max(flat.gradient.nbytes for flat in flats)
        sizes = [gradients, *[largest.vector.nbytes] * 2][: {1: 0, 2: 1, 3: 3}[stage]]
        self.places = [largest.empty((nbytes,), "uint8") for nbytes in sizes]
        for flat in flats if stage > 1 else []:
            flat.bind(flat.vector, as_vector(self.places[0], flat.gradient))
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
        """Return this rank's part of layer k; release what is not kept whole."""
        shard = LayerShard(FlatSlice(flat, 0, flat.size), f"shard of layer {k}", self.group)
        flat.locked = ONLY_STEP
        for p in flat.parameters:
            p.spread = shard.parameter.spread
        if self.stage == 1:
            shard.home.bind(flat.vector[shard.own], flat.gradient[shard.own])
        elif self.stage == 2:
            shard.home.bind(flat.vector[shard.own])
        else:
            flat.bind(as_vector(self.places[1 + k % 2], flat.vector))
            for p in flat.parameters:
                p.elsewhere = ELSEWHERE
        return shard

    def parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates: its shard of every layer."""
        return [s.parameter for s in self.shards]

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add a micro-batch's gradient, summed over the ranks, to the shards.

        loss  the loss of one pass through the model
        last  whether this is the step's last micro-batch; stage 1 sums whole gradients until then
        """
        if self.stage == 1 and self.shards[0].parameter.grad is not None:
            raise ValueError(
                "this step's gradient is reduced already; "
                "pass last=False for all micro-batches but the last"
            )
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
            raise ValueError("loss.backward() does not shard gradients; use zero.backward(loss)")
        if k > self.next:
            raise ValueError(
                f"backward reached layer {k} again after its gradient was reduced; "
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
        """Add up the squares of all shards; pass this to Optimizer.clip_global_norm."""
        if self.split:
            raise ValueError(
                f"{self.split[0]} is split over other ranks too, and zero.sum_squares adds up over "
                "the shards only; use ZeRO on a whole model, or do not clip"
            )
        self._check_reduced()
        return float(self.group.all_reduce(np.array(own)))

    def step(self, optimizer: Optimizer) -> None:
        """Update this rank's shards; give every rank the new weights.

        optimizer  of `zero.parameters()`; its own `step` is refused: it would not tell the others
        """
        with unlocked(self.shards, optimizer):
            self.update_shards(optimizer)

    def _check_reduced(self) -> None:
        if any(s.parameter.grad is None for s in self.shards):
            raise ValueError("no gradient has been reduced; call zero.backward(loss) first")

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
            self.gatherer.wait()  # what comes early is of old weights
        for s in self.shards:
            s.flat.check_home()
            for p, place in zip(s.flat.parameters, s.flat.views(s.flat.vector), strict=True):
                place[...] = new.pop(p.name)
                p.note_load()
            s.parameter.data[...] = s.flat.vector[s.own]
        for name, array in new.items():  # of those that are frozen
            named[name].load(array)

    def _sample(self) -> None:
        """Record how many bytes of weights and gradients are alive; count shared ones once."""
        homes = [home for s in self.shards for home in (s.flat, s.home)]
        alive = [array for home in homes for array in (home.vector, home.gradient)]
        alive += [p.grad for p in self.model.parameters() if p.grad is not None] + self.places
        starts = map(address, alive)
        total = end = 0
        for start, array in sorted(zip(starts, alive, strict=True), key=lambda pair: pair[0]):
            total += max(0, start + array.nbytes - max(start, end))
            end = max(end, start + array.nbytes)
        self.peak = max(self.peak, total)


def as_vector(place: Array, like: Array) -> Array:
    """Return the first bytes of a buffer as a vector of the size and dtype of another one."""
    return place[: like.nbytes].view(like.dtype)


class Gatherer:
    """Stage 3: gather each layer's weights just before use, into two buffers in turn.

    Layer k's parameters are always views of buffer 1 + k mod 2; only its content changes. A graph
    that was built on them is valid again when the layer has been gathered again.
    """

    def __init__(self, shards: list[LayerShard], group: Group):
        self.shards, self.group = shards, group
        self.coming: int | None = None  # the layer whose weights a second thread gathers
        self.beside = group.beside(self.gather, "gather")

    def need(self, k: int, then: int) -> None:
        """Wait until layer k's weights are here; start to gather those of layer `then`."""
        if self.wait() != k:
            self.gather(k)
        if 0 <= then < len(self.shards):
            self.coming = then
            self.beside.put(then)
            self.beside.end()

    def wait(self) -> int | None:
        """Wait for the layer that is coming; return its number, or None if there is none."""
        came, self.coming = self.coming, None
        self.beside.wait(f"the weights of layer {came}")
        return came

    def gather(self, k: int) -> None:
        """Fill layer k's flat vector with every rank's shard."""
        s = self.shards[k]
        self.group.all_gather(s.parameter.data, out=s.flat.vector, label=f"layer {k}")


class ZeroLayer(nn.Module):
    """A layer that tells `zero` when its forward and its backward are about to begin."""

    def __init__(self, layer: nn.Module, number: int, zero: Zero):
        self.layer, self.flat, self.number, self.zero = layer, layer.flat, number, zero

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.zero._before_forward(self.number)
        return BeforeBackward(self.number, self.zero)(self.layer(x, randomness))


class BeforeBackward(Function):
    """Y = X  =>  dX = dY.  When dY arrives, all later layers have their gradients."""

    def __init__(self, number: int, zero: Zero):
        self.number, self.zero = number, zero

    def forward(self, x):
        return x

    def backward(self, grad):
        self.zero._before_backward(self.number)
        return grad
