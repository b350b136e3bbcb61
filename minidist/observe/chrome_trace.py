"""An event log as tracks, one per thread of a rank, and in Chrome's trace event format (Perfetto).

    save_chrome_trace(log, "trace.json")           # open it at https://ui.perfetto.dev

Each rank is a process, each of its threads a track, on which events nest or are disjoint. Times are
microseconds, rounded to eighths: exact in binary and in nanoseconds, and rounding keeps the order,
so no slice is longer than the one around it. A simulator's unit of time becomes a millisecond.
"""

import json
import math
from pathlib import Path

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


def chrome_trace(log: EventLog) -> dict:
    """Return a Chrome trace: a process per rank, a complete event per event, times in us from zero.

    As on Linux, only the main thread has its pid as tid, so that viewers list it first.
    """
    rows = tracks(log)
    others = sorted({thread for _, thread in rows if thread != "main"})
    first = 1 + max((rank for rank, _ in rows), default=0)
    second = 1.0 if log.unit == "s" else 1e-3
    events = []
    for index, ((rank, thread), row) in enumerate(rows.items()):
        tid = rank if thread == "main" else first + others.index(thread)
        events += _labels(rank, tid, thread, index) + [_complete(e, tid, second) for _, e in row]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return trace if log.unit == "s" else trace | {"otherData": {"1 ms": f"1 of {log.unit}"}}


def _labels(rank: int, tid: int, thread: str, index: int) -> list[dict]:
    labels: dict[str, dict] = {
        "process_name": {"name": f"rank {rank}"},
        "thread_name": {"name": thread},
        "process_sort_index": {"sort_index": rank},
        "thread_sort_index": {"sort_index": index},
    }
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": label}
        for name, label in labels.items()
    ]


def _complete(e: Event, tid: int, second: float) -> dict:
    start, end = microseconds(e.start * second), microseconds(e.end * second)
    place = {"ph": "X", "name": e.name, "cat": e.category, "pid": e.rank, "tid": tid}
    return {**place, "ts": start, "dur": end - start, "args": {"bytes": int(e.bytes)}}


def save_chrome_trace(log: EventLog, path: str | Path) -> None:
    """Write the Chrome trace of a log as JSON, for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(log), allow_nan=False), encoding="utf-8")
