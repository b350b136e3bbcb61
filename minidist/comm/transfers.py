"""Collectives whose transfers a library does, where there is one; ranks reduce what it does not.

Without a library they are the algorithms of collectives.py, on messages. With one, each rank lists
all arrays that it sends and all ranks that it receives from, before anything moves. The library
starts them together, so that no transfer waits for one that would start after it.
"""

from collections.abc import Callable
from itertools import pairwise

from minidist.backend import Array
from minidist.comm import collectives
from minidist.comm.channel import Channel
from minidist.comm.message import Staged


def all_to_all(channel: Channel, pieces: list[Array | Staged]) -> list[Array]:
    """Give pieces[r] to rank r; return what each rank gave to this one, in rank order."""
    if channel.library is None:
        return collectives.all_to_all(channel, pieces)
    others = [r for r in range(channel.size) if r != channel.rank]
    found = channel.transfer({r: pieces[r] for r in others}, others)
    return [found[r] if r in found else pieces[r].copy() for r in range(channel.size)]


def from_root(channel: Channel, pieces: list[Array | Staged] | None, root: int) -> Array:
    """Return this rank's one of root's pieces; the other ranks need not have any."""
    if channel.library is None:
        return collectives.from_root(channel, pieces, root)
    if channel.rank != root:
        return channel.transfer({}, [root])[root]
    channel.transfer({r: pieces[r] for r in range(channel.size) if r != root}, [])
    return pieces[root].copy()


def to_root(channel: Channel, x: Array, root: int) -> list[Array] | None:
    """Return every rank's x on root, in rank order, as fresh arrays; None elsewhere."""
    if channel.library is None:
        return collectives.to_root(channel, x, root)
    if channel.rank != root:
        channel.transfer({root: x}, [])
        return None
    found = channel.transfer({}, [r for r in range(channel.size) if r != root])
    return [found[r] if r in found else x.copy() for r in range(channel.size)]


def in_rank_order(channel: Channel, x: Array, combine: Callable[..., Array]) -> None:
    """All-reduce the flat array x in place: rank r reduces chunk r of all ranks, in rank order."""
    if channel.library is None:
        return collectives.in_rank_order(channel, x, combine)
    ends = collectives.split_ends(x.size, channel.size)
    chunks = [x[start:stop] for start, stop in pairwise(ends)]
    mine = collectives.reduce_pieces(all_to_all(channel, chunks), combine)
    for chunk, reduced in zip(chunks, all_to_all(channel, [mine] * channel.size), strict=True):
        chunk[...] = reduced
    return None
