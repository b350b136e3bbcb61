"""An event log as tracks, one per thread of a rank, on which events nest or are disjoint."""

import math

from minidist.errors import WrongInput
from minidist.events import Event, EventLog

Tracks = dict[tuple[int, str], list[tuple[int, Event]]]


def tracks(log: EventLog) -> Tracks:
    """Return {(rank, thread): [(depth, event), ...]}, in seconds from zero, outer events first.

    ValueError if two events of one thread overlap and neither contains the other.
    """
    for e in log.events:
        if not 0 <= e.seconds < math.inf:
            raise WrongInput(f"{e.name!r} of rank {e.rank} starts at {e.start} and ends at {e.end}")
    rows: dict[tuple[int, str], list[Event]] = {}
    last_first = log.from_zero().events[::-1]  # of two equal intervals the outer was logged last
    for e in sorted(last_first, key=lambda e: (e.start, -e.end)):
        rows.setdefault((e.rank, e.thread), []).append(e)
    result = {}
    for rank, thread in sorted(rows, key=lambda row: (row[0], row[1] != "main", row[1])):
        events = rows[rank, thread]
        spans = [(microseconds(e.start), microseconds(e.end), e.name) for e in events]
        depths = nesting(spans, f"rank {rank}, thread {thread}")
        result[rank, thread] = list(zip(depths, events, strict=True))
    return result


def microseconds(seconds: float) -> float:
    """Round to 1/8 us: exact in binary and in nanoseconds, so that sums and readers are exact too.

    Rounding keeps the order: events that nest, or are disjoint, still do or are afterwards.
    """
    return round(seconds * 8e6) / 8


def nesting(spans: list[tuple[float, float, str]], where: str) -> list[int]:
    """Return how many spans are around each (start, end, name); spans are in order of starts."""
    depths: list[int] = []
    around: list[tuple[float, float, str]] = []
    for start, end, name in spans:
        while around and around[-1][1] <= start:
            around.pop()
        if around and end > around[-1][1]:
            raise WrongInput(
                f"{around[-1][2]!r} ({around[-1][0]} to {around[-1][1]} us) and {name!r} ({start} "
                f"to {end} us) overlap on {where}; give threads that run at once different names"
            )
        depths.append(len(around))
        around.append((start, end, name))
    return depths
