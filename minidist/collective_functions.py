"""Collectives as differentiable functions: pairs, each of which is the other's adjoint.

Letters: N ranks of a group, r this one. Layouts: X[B, C] is the same on all ranks (replicated);
X[B, C/N] is this rank's part (split); X[B, C]{+N} is a partial sum, still to be added up over the
ranks. A gradient has a layout, too: of a replicated X that each rank uses for something of its own,
every rank computes a partial sum of dX.

    function        forward                          backward
    copy_to      f  identity     X -> X              all_reduce      dX{+N} -> dX
    reduce_from  g  all_reduce   Y{+N} -> Y          identity        dY -> dY
    scatter         own part     X -> X/N            all_gather      dX/N -> dX
    gather          all_gather   X/N -> X            own part        dX -> dX/N
    all_gather      all_gather   X/N -> X            reduce_scatter  dX{+N} -> dX/N
    reduce_scatter  ... -> part  Y{+N} -> Y/N        all_gather      dY/N -> dY
    all_to_all      all_to_all   X[B/N, C]->[B, C/N] all_to_all      the way back

`gather` and `all_gather` do the same forward. Which backward is right depends on what follows: if
all ranks go on to compute the same thing with X, dX is the same everywhere, and a part of it is
right; if each computes something of its own, dX is a partial sum. f and g are Megatron's (Shoeybi
et al. 2019, section 3, figure 3). A part is as equal to the others as can be, the larger first;
others are refused, since backward could not cut them again.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from minidist.autograd import Function, Tensor
from minidist.backend import Array, array_module, to_host
from minidist.comm import Group
from minidist.comm.collectives import split_ends
from minidist.nn import Module
from minidist.optim import sum_of_squares


class CopyTo(Function):
    """Megatron's f.  Forward: identity X -> X;  backward: all_reduce dX{+N} -> dX."""

    def __init__(self, group: Group):
        self.group = group

    def forward(self, x):
        return x

    def backward(self, grad):
        return self.group.all_reduce(grad, label="f")


class ReduceFrom(Function):
    """Megatron's g.  Forward: all_reduce Y{+N} -> Y;  backward: identity dY -> dY."""

    def __init__(self, group: Group):
        self.group = group

    def forward(self, y):
        return self.group.all_reduce(y, label="g")

    def backward(self, grad):
        return grad


class Scatter(Function):
    """Forward: own part of X along `axis`;  backward: all_gather dX/N -> dX."""

    def __init__(self, group: Group, axis: int):
        self.group, self.axis = group, axis

    def forward(self, x):
        return own_part(x, self.group, self.axis)

    def backward(self, grad):
        return self.group.all_gather(grad, self.axis, label="scatter")


class Gather(Function):
    """Forward: all_gather X/N -> X;  backward: own part of dX, which is the same on all ranks."""

    def __init__(self, group: Group, axis: int):
        self.group, self.axis = group, axis

    def forward(self, x):
        whole = self.group.all_gather(x, self.axis, label="gather")
        return checked(whole, x, self.group, self.axis)

    def backward(self, grad):
        return own_part(grad, self.group, self.axis)


class AllGather(Function):
    """Forward: all_gather X/N -> X;  backward: reduce_scatter dX{+N} -> dX/N."""

    def __init__(self, group: Group, axis: int):
        self.group, self.axis = group, axis

    def forward(self, x):
        whole = self.group.all_gather(x, self.axis, label="all_gather")
        return checked(whole, x, self.group, self.axis)

    def backward(self, grad):
        return reduce_scatter_along(grad, self.group, self.axis)


class ReduceScatter(Function):
    """Forward: reduce_scatter Y{+N} -> Y/N;  backward: all_gather dY/N -> dY."""

    def __init__(self, group: Group, axis: int):
        self.group, self.axis = group, axis

    def forward(self, y):
        return reduce_scatter_along(y, self.group, self.axis)

    def backward(self, grad):
        return self.group.all_gather(grad, self.axis, label="reduce_scatter")


class AllToAll(Function):
    """Forward: X split along `joined` -> X split along `cut`;  backward: the other way round."""

    def __init__(self, group: Group, cut: int, joined: int):
        self.group, self.cut, self.joined = group, cut, joined

    def forward(self, x):
        return exchange(x, self.group, self.cut, self.joined)

    def backward(self, grad):
        return exchange(grad, self.group, self.joined, self.cut)


def sum_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Give every rank the sum of each parameter's gradient over the ranks; None adds zero."""
    for p in parameters:
        if p.requires_grad:
            ranks = summed_ranks(p, group)
            grad = p.xp.zeros_like(p.data) if p.grad is None else p.grad
            p.grad = group.all_reduce(grad, label=p.name)
            p.note_sum(ranks)


def summed_ranks(p: Tensor, group: Group) -> frozenset[int]:
    """Return the ranks over which p's gradient will be a sum when it is summed over the group.

    ValueError if it has a sum in it over two of the group's ranks, which would be summed again. A
    sum over one axis of a mesh may follow that over another one: they share this rank only.
    """
    before, ranks = p.summed_over, frozenset(group.members)
    if len(before & ranks) > 1:
        raise ValueError(
            f"the gradient of {p.name} has a sum over the ranks {sorted(before)} in it, and would "
            "be summed over them again; call the model's zero_grad() after each step"
        )
    return before | ranks


def sum_squares_over(
    counted: Iterable[Tensor], held: Iterable[Tensor], own: float | None, *groups: Group
) -> float:
    """Return the sum of the squares of gradients, over this rank and all others of these groups.

    counted  the parameters that count on this rank, so that of all ranks each is counted once
    held     all of this rank's
    own      the sum of squares of what an optimizer has, or None; ValueError if that is not `held`
    """
    if own is not None and abs(own - (all_of := squares(held))) > 1e-5 * max(own, all_of):
        raise ValueError(
            f"the squares of what is clipped add up to {own:.6g} on this rank, those of its whole "
            f"part to {all_of:.6g}; clip by one optimizer that has all of the rank's parameters"
        )
    total = np.array(squares(counted))
    for group in groups:
        total = group.all_reduce(total, label="squares")
    return float(total)


def squares(parameters: Iterable[Tensor]) -> float:
    flat = [p.grad.reshape(-1) for p in parameters if p.grad is not None]
    return float(sum(sum_of_squares(gradient) for gradient in flat))


def check_same_weights(model: Module, group: Group) -> None:
    """Raise ValueError on every rank unless all ranks have the same names and weights, bit for bit.

    Strategies assume it of replicas, and no gradient shows it: ranks that start from different
    weights stay different.
    """
    check_same_state({name: p.data for name, p in model.named_parameters().items()}, group)


def check_same_state(state: dict[str, Array], group: Group) -> None:
    """Raise ValueError on every rank unless all ranks have the same arrays, bit for bit, by name.

    Each rank sends 8 bytes per array, a hash, in a group of its own: no other ledger counts them.
    """
    if group.size == 1:
        return
    own = np.array([fingerprint(name, array) for name, array in state.items()], np.uint64)
    apart = group.split(0)
    counts = apart.all_gather(np.array([len(own)]), label="weights").tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks have models of {counts} parameters; build the same on all")
    ranks = apart.all_gather(own, label="weights").reshape(group.size, -1)
    differing = (ranks != ranks[0]).any(axis=0)
    if differing.any():
        first = int(differing.argmax())
        rank = int((ranks[:, first] != ranks[0, first]).argmax())
        raise ValueError(
            f"{differing.sum()} of {len(own)} parameters differ between ranks; the first is "
            f"{list(state)[first]}, on ranks 0 and {rank}: give all ranks one seed, or load one "
            "state on all of them (strategies that take check_weights=False then skip this check)"
        )


def fingerprint(name: str, array: Array) -> int:
    """Return 64 bits of an array's name, dtype, shape and data."""
    data = np.ascontiguousarray(to_host(array))
    digest = hashlib.blake2b(f"{name} {data.dtype} {data.shape}".encode(), digest_size=8)
    digest.update(data.reshape(-1).view(np.uint8))
    return int.from_bytes(digest.digest(), "little")


def own_part(x: Array, group: Group, axis: int) -> Array:
    """Return this rank's part of x along `axis`: as equal as can be, the larger first."""
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
    """Cut x along one axis, give a piece to each rank, join what comes in along another axis."""
    xp, ends = array_module(x), split_ends(x.shape[cut], group.size)
    pieces = xp.split(x, ends[1:-1], axis=cut)
    taken = group.all_to_all([xp.ascontiguousarray(q) for q in pieces])
    return checked(xp.concatenate(taken, axis=joined), x, group, joined)


def checked(whole: Array, part: Array, group: Group, axis: int) -> Array:
    """Return the whole if it cuts, on the way back, into the parts that it was joined from."""
    held, ends = part.shape[axis], split_ends(whole.shape[axis], group.size)
    own = ends[group.rank + 1] - ends[group.rank]
    if held != own:
        raise ValueError(
            f"rank {group.rank} holds {held} of {ends[-1]} along axis {axis}, not {own}; "
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
