"""Collectives through shared memory: arrays that lie there on all ranks are written in place.

As the ranks meet, each shows where its array begins, or NOWHERE; so all take the same way, and no
array is copied that lies where the others see it. Else all_reduce goes through stages, a little
shared memory of each rank, and the other two go as messages. Letters: N ranks, S bytes; what moves
is the same on every way (see Group).
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from minidist.backend import Array, beside, on_gpu, to_host
from minidist.comm.channel import Channel
from minidist.comm.collectives import all_to_all, reduce_pieces, split_ends, split_sizes
from minidist.comm.diagnosis import Signature, signature_of
from minidist.comm.shared_memory import (
    NOWHERE,
    gather_where_it_lies,
    reduce_through_stages,
    reduce_where_it_lies,
    scatter_sum_where_it_lies,
)


def all_reduce(group, signature: Signature, x: Array, combine: Callable, out: Array | None):
    """Return the reduction: `out`, if it lies in shared memory on all ranks, or if it is x."""
    if group.size == 1:
        return x if out is x else x.copy()
    memory, board = group.endpoint.memory, group.board
    place = memory.offset_of(out) or NOWHERE
    if place != NOWHERE and out is not x:
        out[...] = to_host(x)
        x = out
    places = board.meet(signature, place)
    own = split_sizes(x.size, group.size)[group.rank]
    moved = x.size - own + (group.size - 1) * own  # what others reduce; N - 1 times my slice
    group.ledger.bytes["all_reduce"] += moved * x.itemsize
    if NOWHERE not in places:
        reduce_where_it_lies(memory, board, places, x.size, x.dtype, combine)
        return out
    direct = out is x and x.flags.c_contiguous and not on_gpu(x)
    result = x if direct else np.empty(x.shape, x.dtype)
    flat = np.ascontiguousarray(to_host(x)).reshape(-1)
    reduce_through_stages(memory, board, signature, flat, combine, result.reshape(-1))
    return beside(result, x)


def reduce_scatter(
    group, signature: Signature, x: Array, sizes: list[int], combine: Callable
) -> Array:
    """Return this rank's sizes[rank] rows of the reduction."""
    memory, ends = group.endpoint.memory, [0, *np.cumsum(sizes).tolist()]
    place = memory.offset_of(x) if group.size > 1 else None
    places = group.board.meet(signature, place or NOWHERE)
    if NOWHERE not in places and x.ndim == 1:
        result, begin = np.empty(sizes[group.rank], x.dtype), ends[group.rank]
        group.ledger.bytes["reduce_scatter"] += x.nbytes - result.nbytes
        scatter_sum_where_it_lies(memory, group.board, places, x.size, begin, combine, result)
        return result
    pieces = [x[start:stop] for start, stop in pairwise(ends)]
    return reduce_pieces(all_to_all(Channel(group, "reduce_scatter"), pieces), combine)


def gather_into(group, out: Array, x: Array, label: str | None) -> Array:
    """Let every rank write its x into everyone's 1-D `out`, of which it is a part; return `out`."""
    ends, memory = split_ends(out.size, group.size), group.endpoint.memory
    begin, stop = ends[group.rank], ends[group.rank + 1]
    if out.ndim != 1 or x.shape != (stop - begin,) or x.dtype != out.dtype:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}; rank {group.rank}'s part of out, "
            f"{out.dtype}{list(out.shape)}, is 1-D and has {stop - begin} elements"
        )
    out[begin:stop] = x  # at once, for x may be another part of out
    place = memory.offset_of(out) if group.size > 1 else None
    signature = signature_of("all_gather", (x.dtype, out.shape, "out"), label)
    places = group.board.meet(signature, place or NOWHERE)
    if NOWHERE not in places:
        group.ledger.bytes["all_gather"] += (group.size - 1) * x.nbytes
        gather_where_it_lies(memory, group.board, places, out, begin, stop)
        return out
    channel = Channel(group, "all_gather")
    others = [r for r in range(group.size) if r != group.rank]
    for r in others:
        channel.send(out[begin:stop], to=r)
    for r in others:
        out[ends[r] : ends[r + 1]] = channel.recv(r)
    return out
