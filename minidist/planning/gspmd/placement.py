"""How a value is placed on the ranks of a group: its type, and the collective from one to another.

    Replicated     X         every rank has X
    Split(axis)    X/N       rank r has part r along an axis
    Partial        X{+N}     every rank has a term; X is their sum

    from / to      Replicated       Split(b)            Partial
    Replicated     nothing          own part            rank 0 has X, the others zeros
    Split(a)       all_gather       all_to_all          as by Replicated
    Partial        all_reduce       reduce_scatter      nothing

A gradient has a placement, too: the `dual` one. The pairing <X, dX>, a sum over all elements, is
the sum of the ranks' own pairings, with each element counted once:

    X Replicated  dX Partial        each rank used X in a part of the computation
    X Split       dX Split          along the same axis
    X Partial     dX Replicated     each term counts fully
"""

from dataclasses import dataclass

import numpy as np

from minidist.backend import Array, array_module, to_host
from minidist.collective_functions import exchange, own_part, reduce_scatter_along
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.pieces import split_ends


@dataclass(frozen=True)
class Replicated:
    """X: every rank has all of it."""

    def __str__(self):
        return "R"


@dataclass(frozen=True)
class Split:
    """X/N: rank r has part r along an axis; parts are as equal as can be, the larger first."""

    axis: int

    def __str__(self):
        return f"S{self.axis}"


@dataclass(frozen=True)
class Partial:
    """X{+N}: every rank has a term of a sum."""

    def __str__(self):
        return "P"


Placement = Replicated | Split | Partial
REPLICATED, PARTIAL = Replicated(), Partial()


def part(x: Array, placement: Placement, rank: int, size: int) -> Array:
    """Return what a rank has of X; of a partial sum rank 0 has X, the others zeros."""
    match placement:
        case Split(axis):
            ends = split_ends(x.shape[axis], size)
            return x[(slice(None),) * axis + (slice(ends[rank], ends[rank + 1]),)]
        case Partial() if rank:
            return array_module(x).zeros_like(x)
    return x


def full(parts: list[Array], placement: Placement) -> Array:
    """Return X from what the ranks have: the meaning of a placement.

    ValueError if it is replicated, and two ranks differ.
    """
    xp = array_module(*parts)
    match placement:
        case Split(axis):
            return xp.concatenate(parts, axis=axis)
        case Partial():
            return sum(parts[1:], start=parts[0])
    first = to_host(parts[0])
    for rank, x in enumerate(map(to_host, parts)):
        if x.shape != first.shape or not np.allclose(x, first, rtol=1e-9, atol=1e-12):
            raise WrongInput(f"a replicated value differs on ranks 0 and {rank}; reduce it first")
    return parts[0]


def dual(placement: Placement) -> Placement:
    """Return the placement of the gradient of a value that ranks used in this one, each a part."""
    duals: dict[Placement, Placement] = {REPLICATED: PARTIAL, PARTIAL: REPLICATED}
    return duals.get(placement, placement)


def collective(source: Placement, target: Placement) -> str | None:
    """Return the name of the collective between two placements; None: no bytes travel."""
    match source, target:
        case _ if source == target:
            return None
        case Split(), Split():
            return "all_to_all"
        case Split(), _:
            return "all_gather"
        case Partial(), Replicated():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
    return None


def redistribute(x: Array, group: Group, source: Placement, target: Placement) -> Array:
    """Return this rank's part of a value in another placement."""
    name = f"{source}->{target}"
    match source, target:
        case _ if source == target:
            return x
        case Split(a), Split(b):
            return exchange(x, group, cut=b, joined=a)
        case Split(a), _:
            whole = group.all_gather(x, a, label=name)
            return redistribute(whole, group, REPLICATED, target)
        case Partial(), Replicated():
            return group.all_reduce(x, label=name)
        case Partial(), Split(b):
            return reduce_scatter_along(x, group, b)
        case Replicated(), Split(b):
            return own_part(x, group, b)
    return part(x, PARTIAL, group.rank, group.size)
