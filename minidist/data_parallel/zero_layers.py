"""The layers of a model under ZeRO: when each is about to begin, and whose weights are here.

forward    layer 0 | layer 1 | ...            before a layer begins, its weights are gathered
backward   ... | layer 1 | layer 0            ... and all later layers have their gradients
"""

from collections import Counter
from collections.abc import Callable

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.data_parallel.layer_shard import LayerShard
from minidist.rng import Randomness

Hook = Callable[[int], None]  # of a layer's number


def tied_between_layers(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that several layers use."""
    users = Counter(p for layer in model.layers for p in layer.parameters())
    return [p for p, layers in users.items() if layers > 1]


def check_stage(
    model: nn.Module, group: Group, stage: int, shards: int, tied: list[nn.Parameter]
) -> None:
    """Raise ValueError unless the model can be cut so."""
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage!r}")
    if stage > 1 and not isinstance(model, nn.Sequential):
        raise ValueError(f"stage {stage} needs an nn.Sequential, not {type(model).__name__}")
    if shards < 1 or group.size % shards:
        raise ValueError(f"groups of {shards} shards do not make up {group.size} ranks")
    if stage == 3 and tied:
        raise ValueError(
            f"{tied[0].name!r} belongs to several layers, and stage 3 keeps the weights "
            "of one layer at a time; use a model that is not tied, or stage 2"
        )


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
    """

    def __init__(self, shards: list[LayerShard], group: Group):
        self.shards, self.group = shards, group
        self.coming: int | None = None  # the layer whose weights a second thread gathers
        self.beside = group.beside(self.gather, "gather")

    def need(self, k: int, then: int) -> None:
        """Wait until layer k's weights are here; start to gather layer `then`."""
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
        self.group.all_gather(s.parameter.data, out=s.whole.vector, label=f"layer {k}")
