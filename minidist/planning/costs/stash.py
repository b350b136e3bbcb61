"""How many forward passes a pipeline's ranks hold at once, by chunk: from the programs, for any m.

One entry of a rank with v chunks is a point of its program, after a forward pass:

    (held_0, ..., held_v-1, waiting_0, ..., waiting_v-1)

held     micro-batches whose activations a chunk holds
waiting  how many of these are between I and W, the halves of their backward

    1F1B, rank 0 of 4:  F0 F1 F2 F3 B0 F4 B1 ...      4 held from F3 on: ((4, 0),)

Letters: p ranks, m micro-batches, v chunks. Where forward passes do not run ahead of backward, the
entries are the same for all m from 2 p. Where they do, they grow by the same number with each
micro-batch (gpipe, looped_bfs); any other schedule repeats itself every p micro-batches.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from operator import ge, mul

from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    looped,
)
from minidist.pipeline_parallel.schedules import actions_of_rank
from minidist.pipeline_parallel.zero_bubble import v_shaped
from minidist.planning.plans.plan import V_SHAPED

FULL = 4  # after this many times p micro-batches, any pipeline repeats itself
GROWING = "gpipe", "looped_bfs"
BOUNDED = {"1f1b": 1, "zb_h1": 1} | dict.fromkeys(  # from this many times p micro-batches
    ("interleaved", "interleaved_zb", "zb_h2", *V_SHAPED), 2
)

Entry = tuple[int, ...]


def in_flight(schedule: str, p: int, m: int, v: int) -> tuple[tuple[Entry, ...], ...]:
    """Return each rank's entries that no other entry of the rank exceeds in all numbers."""
    return tuple(in_flight_on(r, schedule, p, m, v) for r in range(p))


@lru_cache(maxsize=100_000)
def in_flight_on(r: int, schedule: str, p: int, m: int, v: int) -> tuple[Entry, ...]:
    """Return the entries of rank r."""
    if m > (most := bounded(schedule, p, m)):
        return in_flight_on(r, schedule, p, most, v)
    short, more = (1, 1) if schedule in GROWING else (FULL * p + m % p, p)
    if m <= short + more:
        return entries(actions_of_rank(schedule, p, m, v, r), v)
    first, second = (in_flight_on(r, schedule, p, n, v) for n in (short, short + more))
    times = (m - short) // more
    return tuple(
        tuple(a + times * (b - a) for a, b in zip(x, y, strict=True))
        for x, y in zip(first, second, strict=True)
    )


def bounded(schedule: str, p: int, m: int) -> int:
    """Return a number of micro-batches, m or fewer, that has the same entries."""
    return min(m, BOUNDED.get(schedule, m) * p)


@lru_cache(maxsize=1024)
def placement(schedule: str, p: int, v: int) -> list[list[int]]:
    """Return the virtual stages of each rank, for any m."""
    return v_shaped(p) if schedule in V_SHAPED else looped(p, v)


def entries(program: list[Action], v: int) -> tuple[Entry, ...]:
    """Return the entries of one rank's program with v chunks, sorted.

    Of forward passes in a row only the last one counts: it holds more than those before.
    """
    now, found, grown = [0] * (2 * v), set(), False
    for action in program:
        kind, c = type(action), action.chunk
        if grown and kind is not Forward:
            found.add(tuple(now))
        grown = kind is Forward
        if grown:
            now[c] += 1
        elif kind is Backward:
            now[c] -= 1
        elif kind is BackwardInput:
            now[v + c] += 1
        elif kind is BackwardWeight:
            now[c] -= 1
            now[v + c] -= 1
    return tuple(sorted(largest(found)))


def peak_of(points: Iterable[Entry], each: list[int]) -> int:
    """Return the most bytes at any of these points, for the bytes of each number of an entry."""
    return max(sum(map(mul, point, each)) for point in points)


def largest(found: set[Entry]) -> list[Entry]:
    """Return the entries that no other one exceeds; only one with a larger sum can do so."""
    kept: list[Entry] = []
    for total, group in groupby(sorted(found, key=sum, reverse=True), key=sum):
        above = [e for e in kept if sum(e) > total]
        kept += [e for e in group if not any(all(map(ge, other, e)) for other in above)]
    return kept
