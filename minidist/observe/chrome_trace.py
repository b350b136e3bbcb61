"""An event log in Chrome's trace event format, which Perfetto opens (https://ui.perfetto.dev).

    save_chrome_trace(log, "trace.json")

Each rank is a process, each of its threads a track. Times are microseconds, rounded to eighths:
that is exact in binary and in nanoseconds and keeps the order, so that no slice is longer than the
one around it. A simulator's unit of time becomes a millisecond; `otherData` says so.
"""

import json
from pathlib import Path

from minidist.events import Event, EventLog
from minidist.observe.tracks import microseconds, tracks

METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def chrome_trace(log: EventLog) -> dict:
    """Return a Chrome trace: a process per rank, a complete event per event, times in us from zero.

    As on Linux, only the main thread has its pid as tid, so that viewers list it first.
    """
    rows = tracks(log)
    others = sorted({thread for _, thread in rows if thread != "main"})
    first = 1 + max((rank for rank, _ in rows), default=0)
    second = 1.0 if log.unit == "s" else 1e-3
    found = []
    for index, ((rank, thread), row) in enumerate(rows.items()):
        tid = rank if thread == "main" else first + others.index(thread)
        found += _labels(rank, tid, thread, index) + [_complete(e, tid, second) for _, e in row]
    trace = {"traceEvents": found, "displayTimeUnit": "ms"}
    return trace if log.unit == "s" else trace | {"otherData": {"1 ms": f"1 of {log.unit}"}}


def _labels(rank: int, tid: int, thread: str, index: int) -> list[dict]:
    values = (f"rank {rank}", thread, rank, index)
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": {key: value}}
        for (name, key), value in zip(METADATA.items(), values, strict=True)
    ]


def _complete(e: Event, tid: int, second: float) -> dict:
    start, end = microseconds(e.start * second), microseconds(e.end * second)
    place = {"ph": "X", "name": e.name, "cat": e.category, "pid": e.rank, "tid": tid}
    return {**place, "ts": start, "dur": end - start, "args": {"bytes": int(e.bytes)}}


def save_chrome_trace(log: EventLog, path: str | Path) -> None:
    """Write the Chrome trace of a log as JSON, for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(log), allow_nan=False), encoding="utf-8")
