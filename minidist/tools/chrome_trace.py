"""An event log in Chrome's trace event format, which Perfetto opens (https://ui.perfetto.dev).

    save_chrome_trace(log, "trace.json")

Each rank is a process, each of its threads a track. Times are microseconds, rounded to eighths:
that is exact in binary and in nanoseconds and keeps the order, so that no slice is longer than the
one around it. A simulator's unit of time becomes a millisecond; `otherData` says so.
"""

import json
import math
from pathlib import Path

from minidist.events import Event, EventLog
from minidist.tools.tracks import microseconds, nesting, tracks

METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
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
        for (name, (key, _)), value in zip(METADATA.items(), values, strict=True)
    ]


def _complete(e: Event, tid: int, second: float) -> dict:
    start, end = microseconds(e.start * second), microseconds(e.end * second)
    place = {"ph": "X", "name": e.name, "cat": e.category, "pid": e.rank, "tid": tid}
    return {**place, "ts": start, "dur": end - start, "args": {"bytes": int(e.bytes)}}


def save_chrome_trace(log: EventLog, path: str | Path) -> None:
    """Write the Chrome trace of a log as JSON, for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(log), allow_nan=False), encoding="utf-8")


def check_chrome_trace(trace: dict) -> None:
    """Raise ValueError unless a trace has the form that `chrome_trace` gives it.

    Complete events have all keys, times in us and bytes, both at least 0. On one (pid, tid) they
    nest or are disjoint, without tolerance. Every pid and every (pid, tid) has a name.
    """
    _check_value(trace, "traceEvents", list)
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        raise ValueError(f"displayTimeUnit is {trace.get('displayTimeUnit')!r}, not 'ms' or 'ns'")
    slices, names = {}, set()
    for e in trace["traceEvents"]:
        _check_event(e)
        if e["ph"] == "X":
            span = (e["ts"], e["ts"] + e["dur"], e["name"])
            slices.setdefault((e["pid"], e["tid"]), []).append(span)
        else:
            names |= {(e["name"], e["pid"]), (e["name"], e["pid"], e["tid"])}
    for (pid, tid), spans in slices.items():
        if ("process_name", pid) not in names or ("thread_name", pid, tid) not in names:
            raise ValueError(f"pid {pid}, tid {tid} lacks its process_name or its thread_name")
        nesting(sorted(spans, key=lambda span: (span[0], -span[1])), f"pid {pid}, tid {tid}")


def _check_event(e: dict) -> None:
    """Check the keys and values of one event, each by itself."""
    for key, want in {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}.items():
        _check_value(e, key, want)
    if e["ph"] == "X":
        for key, want in {"cat": str, "ts": float, "dur": float}.items():
            _check_value(e, key, want)
        _check_value(e["args"], "bytes", int)
    elif e["ph"] == "M" and e["name"] in METADATA:
        _check_value(e["args"], *METADATA[e["name"]])
    else:
        raise ValueError(f"{e!r} is neither a complete event (ph X) nor a name or sort index")


def _check_value(values: dict, key: str, want: type) -> None:
    """Check that values[key] exists and has this type; numbers must be finite and 0 or more."""
    value = values.get(key) if isinstance(values, dict) else None
    number = want in (int, float)
    types = (int, float) if want is float else want
    if not isinstance(value, types) or (number and isinstance(value, bool)):
        raise ValueError(f"{key!r} in {values!r} must be of type {want.__name__}")
    if number and not 0 <= value < math.inf:
        raise ValueError(f"{key!r} in {values!r} must be finite, 0 or more")
