"""Ring x Ulysses: U neighbours exchange heads, and N/U such groups form a ring.

Fang and Zhao, USP: A Unified Sequence Parallelism Approach for Long Context Generative AI (2024).
Letters: N ranks, U of them in a group; T positions; K heads of keys and values, H query heads.

    rank                         0 1 | 2 3 | 4 5 | 6 7     N = 8, U = 2
    all_to_all of heads between  0-1   2-3   4-5   6-7     T/N positions of K heads -> U T/N of K/U
    a ring of keys and values    0-2-4-6 and 1-3-5-7       N/U - 1 hops, with K/U heads

Ulysses alone has no use for more ranks than heads; a ring alone sends N - 1 blocks. Here the many
bytes of the all_to_all stay between neighbours, on one machine, and the ring has N/U ranks. With
U = 1 this is ring attention, with U = N Ulysses. A group's positions are the union of its ranks'.
"""

from collections.abc import Callable
from typing import NamedTuple

from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.context_parallel.cuts import union
from minidist.context_parallel.ulysses import HeadsToSequence, SequenceToHeads, shared_heads
from minidist.errors import WrongInput
from minidist.pieces import Documents, Positions


class Axes(NamedTuple):
    """The ranks that exchange heads with this one, and the ranks that have its heads."""

    heads: Group
    ring: Group


def axes_of(group: Group, U: int) -> Axes:
    """Cut a group into N/U runs of U neighbours; ValueError unless U divides N."""
    if U < 1 or group.size % U:
        raise WrongInput(
            f"{group.size} ranks are not cut into groups of {U} that exchange heads; "
            f"use a divisor of {group.size}"
        )
    return Axes(group.split(group.rank // U), group.split(group.rank % U))


def usp(
    qkv: Tensor,
    group: Group,
    held: list[Positions],
    documents: Documents | None = None,
    *,
    axes: Axes,
    attention: Callable,
) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[G + 2, B, K, T/N, D] -> O[B, H, T/N, D].

    attention  of a ring of groups, as if each were a rank: ring_attention or gathered_attention
    """
    U, first = axes.heads.size, group.rank - axes.heads.rank
    neighbours = held[first : first + U]
    groups = [union(held[r : r + U]) for r in range(0, len(held), U)]
    part = SequenceToHeads(axes.heads, neighbours)(shared_heads(qkv, axes.heads))
    mixed = attention(part, axes.ring, groups, documents)
    return HeadsToSequence(axes.heads, neighbours)(mixed)
