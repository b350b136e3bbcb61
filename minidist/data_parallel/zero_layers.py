"""The layers of a model under ZeRO: when each is about to begin, and whose weights are here.

forward    layer 0 | layer 1 | ...            before a layer begins, its weights are gathered
backward   ... | layer 1 | layer 0            ... and all later layers have their gradients
"""

from collections.abc import Callable

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.autograd.recording import tick
from minidist.backend import Array
from minidist.comm import Group
from minidist.data_parallel.layer_shard import LayerShard
from minidist.rng import Randomness

Hook = Callable[[int], None]  # of a layer's number
Gather = Callable[[LayerShard, Group, str], None]  # fills a run of weights; label of its messages


class ZeroLayer(nn.Module):
    """Layer k, which calls these hooks when its forward and its backward are about to begin."""

    def __init__(self, layer: nn.Module, k: int, before_forward: Hook, before_backward: Hook):
        self.layer, self.flat, self.k = layer, layer.flat, k
        self.before_forward, self.before_backward = before_forward, before_backward

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.before_forward(self.k)
        return BeforeBackward(self.k, self.before_backward)(self.layer(x, randomness))


class BeforeBackward(Function):
    """Y = X  =>  dX = dY.  When dY arrives, all later layers have their gradients."""

    def __init__(self, k: int, hook: Hook):
        self.k, self.hook = k, hook

    def forward(self, x):
        return x

    def backward(self, grad):
        self.hook(self.k)
        return grad


class Gatherer:
    """Stage 3: gather each layer's weights just before use, into two buffers in turn.

    Layer k's parameters are always views of buffer 1 + k mod 2; only its content changes. A graph
    that was built on them is valid again when the layer has been gathered again.

    layers  the shards of each layer
    groups  {the group of a shard: the same ranks in another group, for a second thread}
    gather  how the weights travel
    began   when the second thread may have begun, on the clock of `tick`
    """

    def __init__(self, layers: list[list[LayerShard]], groups: dict[Group, Group], gather: Gather):
        self.layers, self.groups, self.fill = layers, groups, gather
        self.coming: int | None = None  # the layer whose weights a second thread gathers
        self.began = 0
        self.beside = next(iter(groups.values())).beside(self.gather, "gather")

    def need(self, k: int, then: int) -> None:
        """Wait until layer k's weights are here; start to gather layer `then`."""
        if self.wait() != k:
            self.gather(k)
        if 0 <= then < len(self.layers):
            self.coming = then
            self.beside.put(then)
            self.beside.end()

    def wait(self) -> int | None:
        """Wait for the layer that is coming; return its number.

        None: there is none, or its shards have other weights since.
        """
        came, self.coming = self.coming, None
        self.beside.wait(f"the weights of layer {came}")
        shards = [] if came is None else self.layers[came]
        old = any(s.part.last_changed() > self.began for s in shards)
        self.began = tick()
        return None if old else came

    def gather(self, k: int) -> None:
        """Fill layer k's flat vector with every rank's shards."""
        for s in self.layers[k]:
            self.fill(s, self.groups[s.group], f"layer {k}")


def gather_whole(shard: LayerShard, group: Group, label: str) -> None:
    """Fill a run of weights with every rank's shard of it."""
    group.all_gather(shard.parameter.data, out=shard.run.data, label=label)
