"""Collectives as differentiable functions, in pairs: each is the other's adjoint.

Letters: N ranks of a group, r this one. Layouts: X[B, C] is the same on all ranks (replicated);
X[B, C/N] is this rank's part (split); X[B, C]{+N} is a partial sum, still to be added up over the
ranks. A gradient has a layout, too: if each rank uses a replicated X in a different way, every rank
computes a partial sum of dX.

    function        forward                          backward
    copy_to      f  identity     X -> X              all_reduce      dX{+N} -> dX
    reduce_from  g  all_reduce   Y{+N} -> Y          identity        dY -> dY
    scatter         own part     X -> X/N            all_gather      dX/N -> dX
    gather          all_gather   X/N -> X            own part        dX -> dX/N
    all_gather      all_gather   X/N -> X            reduce_scatter  dX{+N} -> dX/N
    reduce_scatter  reduce_scatter Y{+N} -> Y/N      all_gather      dY/N -> dY
    all_to_all      all_to_all   X[B/N, C]->[B, C/N] all_to_all      the way back

`gather` and `all_gather` do the same in forward. Which backward is right depends on what follows:
if all ranks compute the same thing with X, dX is then equal on all ranks, and backward takes this
rank's part of it; if each rank computes something different, dX is a partial sum. f and g are
Megatron's (Shoeybi et al. 2019, section 3, figure 3). Parts must be as equal as can be, the larger
first; others are refused, because backward could not cut them again.
"""

from minidist.autograd import Function, Tensor
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.pieces import split_ends


class OverRanks(Function):
    """A function that all ranks of a group call; parts are cut and joined along `axis`."""

    def __init__(self, group: Group, axis: int = -1):
        self.group, self.axis = group, axis


class CopyTo(OverRanks):
    """Megatron's f.  Forward: identity X -> X;  backward: all_reduce dX{+N} -> dX."""

    def forward(self, x):
        return x

    def backward(self, grad):
        return self.group.all_reduce(grad, label="f")


class ReduceFrom(OverRanks):
    """Megatron's g.  Forward: all_reduce Y{+N} -> Y;  backward: identity dY -> dY."""

    def forward(self, y):
        return self.group.all_reduce(y, label="g")

    def backward(self, grad):
        return grad


class Scatter(OverRanks):
    """Forward: this rank's part of X along `axis`;  backward: all_gather dX/N -> dX."""

    def forward(self, x):
        return own_part(x, self.group, self.axis)

    def backward(self, grad):
        return self.group.all_gather(grad, self.axis, label="scatter")


class Gather(OverRanks):
    """Forward: all_gather X/N -> X;  backward: this rank's part of dX, equal on all ranks."""

    def forward(self, x):
        whole = self.group.all_gather(x, self.axis, label="gather")
        return checked(whole, x, self.group, self.axis)

    def backward(self, grad):
        return own_part(grad, self.group, self.axis)


class AllGather(OverRanks):
    """Forward: all_gather X/N -> X;  backward: reduce_scatter dX{+N} -> dX/N."""

    def forward(self, x):
        whole = self.group.all_gather(x, self.axis, label="all_gather")
        return checked(whole, x, self.group, self.axis)

    def backward(self, grad):
        return reduce_scatter_along(grad, self.group, self.axis)


class ReduceScatter(OverRanks):
    """Forward: reduce_scatter Y{+N} -> Y/N;  backward: all_gather dY/N -> dY."""

    def forward(self, y):
        return reduce_scatter_along(y, self.group, self.axis)

    def backward(self, grad):
        return self.group.all_gather(grad, self.axis, label="reduce_scatter")


class AllToAll(Function):
    """Forward: X split along `joined` -> X split along `cut`;  backward: the reverse."""

    def __init__(self, group: Group, cut: int, joined: int):
        self.group, self.cut, self.joined = group, cut, joined

    def forward(self, x):
        return exchange(x, self.group, self.cut, self.joined)

    def backward(self, grad):
        return exchange(grad, self.group, self.joined, self.cut)


def own_part(x: Array, group: Group, axis: int) -> Array:
    """Return this rank's part of x along `axis`; parts are as equal as can be, larger first."""
    ends = split_ends(x.shape[axis], group.size)
    cut = [slice(None)] * x.ndim
    cut[axis] = slice(ends[group.rank], ends[group.rank + 1])
    return x[tuple(cut)].copy()


def reduce_scatter_along(x: Array, group: Group, axis: int) -> Array:
    """Return this rank's part, along `axis`, of the sum over the ranks."""
    xp = array_module(x)
    rows = group.reduce_scatter(xp.ascontiguousarray(xp.moveaxis(x, axis, 0)))
    return xp.ascontiguousarray(xp.moveaxis(rows, 0, axis))


def exchange(x: Array, group: Group, cut: int, joined: int) -> Array:
    """Cut x along one axis, give a piece to each rank, join the received pieces along another."""
    xp, ends = array_module(x), split_ends(x.shape[cut], group.size)
    pieces = xp.split(x, ends[1:-1], axis=cut)
    taken = group.all_to_all([xp.ascontiguousarray(q) for q in pieces])
    return checked(xp.concatenate(taken, axis=joined), x, group, joined)


def checked(whole: Array, part: Array, group: Group, axis: int) -> Array:
    """Return the whole if backward would cut it into the same parts; else raise ValueError."""
    length, ends = part.shape[axis], split_ends(whole.shape[axis], group.size)
    equal = ends[group.rank + 1] - ends[group.rank]
    if length != equal:
        raise WrongInput(
            f"rank {group.rank} holds {length} of {ends[-1]} along axis {axis}, not {equal}; "
            "use parts as equal as can be, the larger first, as `scatter` gives"
        )
    return whole


def copy_to(x: Tensor, group: Group) -> Tensor:
    return CopyTo(group)(x)


def reduce_from(y: Tensor, group: Group) -> Tensor:
    return ReduceFrom(group)(y)


def scatter(x: Tensor, group: Group, axis: int = -1) -> Tensor:
    return Scatter(group, axis)(x)


def gather(x: Tensor, group: Group, axis: int = -1) -> Tensor:
    return Gather(group, axis)(x)


def all_gather(x: Tensor, group: Group, axis: int = -1) -> Tensor:
    return AllGather(group, axis)(x)


def reduce_scatter(y: Tensor, group: Group, axis: int = -1) -> Tensor:
    return ReduceScatter(group, axis)(y)


def all_to_all(x: Tensor, group: Group, cut: int, joined: int) -> Tensor:
    return AllToAll(group, cut, joined)(x)
