"""The layers of a model under ZeRO: their shards, whose weights are here, what they share.

forward    layer 0 | layer 1 | ...            before a layer begins, its weights are gathered
backward   ... | layer 1 | layer 0            ... and all later layers have their gradients
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from minidist import nn
from minidist.autograd import Function, Tensor
from minidist.autograd.number_format import NumberFormat
from minidist.autograd.recording import Since
from minidist.backend import Array, address
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import FlatParameters, FlatSlice, check_flat
from minidist.nn.parameter import Placement
from minidist.parallel.trainer import AnyOptimizer
from minidist.pieces import split_ends
from minidist.rng import Randomness

ONLY_STEP = (
    "these are shards: call zero.step(optimizer), or hybrid.step(optimizer), "
    "which gives all ranks the new weights"
)
SPREAD = "ZeRO's shards: pass sum_squares=zero.sum_squares"


class LayerShard:
    """What this rank keeps of a run of a layer's flat vector, as a parameter of its own.

    run         the elements that the ranks of the group have copies of; cut as equally as can be
    elements    of the run that are this rank's
    name        of the parameter
    whole, part  the layer's whole vector; the vector of this rank's part alone
    parameter   that part, which the optimizer updates
    """

    def __init__(self, run: FlatSlice, name: str, group: Group):
        self.run, self.whole, self.group = run, run.home, group
        ends = split_ends(run.stop - run.start, group.size)
        self.elements = slice(ends[group.rank], ends[group.rank + 1])
        self.parameter = nn.Parameter(run.data[self.elements], name)
        self.parameter.format = NumberFormat(grad_dtype=run.gradient.dtype)
        self.parameter.placement = Placement(cuts=run.within(self.elements).slices, spread=SPREAD)
        self.part = FlatParameters([self.parameter])  # copies
        self.part.locked = self.whole.locked = ONLY_STEP
        self.part.part_of = self.whole
        for p in run.parts:
            p.keeper, p.placement.spread = self.parameter, SPREAD

    def __reduce__(self):
        raise WrongInput(
            f"the {self.parameter.name} is cut from vectors of this rank, and cannot be copied or "
            "pickled, nor the Zero or Hybrid of it, nor its layers; copy the arrays of its state()"
        )


def load_shards(
    shards: list[LayerShard], named: dict[str, nn.Parameter], state: dict[str, Array]
) -> None:
    """Copy arrays by name, as `cast_state` returns them, into the runs and their shards.

    named  all parameters, also those that are frozen and in no shard
    """
    check_flat(named.values(), [s.whole for s in shards])
    left = dict(state)
    for s in shards:
        for p, part in s.run.parts.items():
            s.run.data[part] = left.pop(p.name).reshape(-1)
            p.note_replaced()
        s.parameter.data[...] = s.run.data[s.elements]
    for name, array in left.items():
        named[name].load(array)


@contextmanager
def unlocked(
    shards: list[LayerShard], parameters: Iterable[nn.Parameter], optimizer: AnyOptimizer
) -> Iterator[None]:
    """Let this optimizer, which must have all these shards, update them meanwhile.

    parameters  all of this rank, also those that are frozen and in no shard
    """
    check_flat(parameters, [s.whole for s in shards])
    if missing := {s.parameter for s in shards} - set(optimizer.parameters):
        raise WrongInput(
            f"the optimizer lacks the {missing.pop().name}; make it with parameters() of the Zero "
            "or Hybrid, not with model.parameters()"
        )
    for s in shards:
        s.part.locked = None
    try:
        yield
    finally:
        for s in shards:
            s.part.locked = ONLY_STEP
    for s in shards:
        s.whole.changed(s.parameter.updated)  # an optimizer that follows others' changes knows it


class ZeroLayer(nn.Module):
    """Layer k, which calls these hooks when its forward and its backward are about to begin."""

    def __init__(
        self,
        layer: nn.Module,
        k: int,
        before_forward: Callable[[int], None],
        before_backward: Callable[[int], None],
    ):
        self.layer, self.flat, self.k = layer, layer.flat, k
        self.before_forward, self.before_backward = before_forward, before_backward

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.before_forward(self.k)
        return BeforeBackward(self.k, self.before_backward)(self.layer(x, randomness))


class BeforeBackward(Function):
    """Y = X  =>  dX = dY.  When dY arrives, all later layers have their gradients."""

    def __init__(self, k: int, hook: Callable[[int], None]):
        self.k, self.hook = k, hook

    def forward(self, x):
        return x

    def backward(self, grad):
        self.hook(self.k)
        return grad


Gather = Callable[[LayerShard, Group, str], None]  # fills a run of weights; label of its messages


class Gatherer:
    """Stage 3: gather each layer's weights just before use, into two buffers in turn.

    Layer k's parameters are always views of buffer 1 + k mod 2; only its content changes. A graph
    that was built on them is valid again when the layer has been gathered again.

    layers  the shards of each layer
    groups  {the group of a shard: the same ranks in another group, for a second thread}
    gather  how the weights travel
    since   whether the shards of the layer that is coming have changed since it was begun
    """

    def __init__(self, layers: list[list[LayerShard]], groups: dict[Group, Group], gather: Gather):
        self.layers, self.groups, self.fill = layers, groups, gather
        self.coming: int | None = None  # the layer whose weights a second thread gathers
        self.since = Since(self.last_changed)
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
        self.beside.wait(f"the weights of layer {self.coming}")
        came = None if self.since.behind() else self.coming
        self.coming = None
        self.since.follow()
        return came

    def last_changed(self) -> int:
        shards = [] if self.coming is None else self.layers[self.coming]
        return max((s.part.last_changed() for s in shards), default=0)

    def gather(self, k: int) -> None:
        """Fill layer k's flat vector with every rank's shards."""
        for s in self.layers[k]:
            self.fill(s, self.groups[s.group], f"layer {k}")


def gather_whole(shard: LayerShard, group: Group, label: str) -> None:
    """Fill a run of weights with every rank's shard of it."""
    group.all_gather(shard.parameter.data, out=shard.run.data, label=label)


def shared_buffers(flats: list[FlatParameters], stage: int) -> list[Array]:
    """Return buffers as large as the largest layer: for a gradient and, in stage 3, two layers.

    All gradients are in the first one from now on; weights still are where they were.
    """
    largest = max(flats, key=lambda flat: flat.vector.nbytes)
    sizes = [max(flat.gradient.nbytes for flat in flats)]
    if stage == 3:
        sizes += [largest.vector.nbytes] * 2
    buffers = [largest.empty((nbytes,), "uint8") for nbytes in sizes]
    for flat in flats:
        flat.bind(flat.vector, as_vector(buffers[0], flat.gradient))
    return buffers


def as_vector(buffer: Array, like: Array) -> Array:
    """Return the first bytes of a buffer as a vector of the size and dtype of another one."""
    return buffer[: like.nbytes].view(like.dtype)


def bytes_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of all arrays together; views of the same memory count once."""
    total = reached = 0
    for start, nbytes in sorted((address(a), a.nbytes) for a in arrays):
        total += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return total
