"""An event log as a picture: as text, as a figure, and as a Chrome trace that Perfetto opens.

    log = EventLog()
    minidist.run(worker, 2, log=log)
    print(timeline.text(log))
    timeline.save_chrome_trace(log, "trace.json")            # open in https://ui.perfetto.dev

A row is a thread of a rank, so communication beside compute shows as two rows busy at one time.
Events of one thread nest or are disjoint. Names may carry numbers and labels: "F0" is of the kind
"F", "all_reduce layer.weight" of the kind "all_reduce".
"""

import json
import math
import re
import string
import textwrap
from itertools import count, groupby
from pathlib import Path
from typing import Any

from minidist.events import Event, EventLog
from minidist.tools import figures

UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
COLORS = {  # compute: any other name; sky blue, of Okabe and Ito like the rest
    "compute": "#56B4E9",
    "forward": figures.FORWARD,
    "backward": figures.BACKWARD,
    "update": figures.UPDATE,
    "communication": figures.COMMUNICATION,
}
SHORT = {"F": "forward", "B": "backward", "U": "update"}
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def tracks(log: EventLog) -> dict[tuple[int, str], list[tuple[int, Event]]]:
    """Return {(rank, thread): [(depth, event), ...]}, in seconds from zero, outer events first.

    Raises ValueError where two events of one thread overlap and neither contains the other.
    """
    for e in log.events:
        if not 0 <= e.seconds < math.inf:
            raise ValueError(f"{e.name!r} of rank {e.rank} starts at {e.start} and ends at {e.end}")
    rows = {}
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
    """Round to 1/8 us: exact in binary and in whole nanoseconds, so sums and readers are exact too.

    Rounding keeps order, so what nests or is disjoint before does so after.
    """
    return round(seconds * 8e6) / 8


def nesting(spans: list[tuple[float, float, str]], where: str) -> list[int]:
    """Return how many spans lie around each (start, end, name); they come in order of starts."""
    depths, around = [], []
    for start, end, name in spans:
        while around and around[-1][1] <= start:
            around.pop()
        if around and end > around[-1][1]:
            raise ValueError(
                f"{around[-1][2]!r} ({around[-1][0]} to {around[-1][1]} us) and {name!r} ({start} "
                f"to {end} us) overlap on {where}; give threads that run at once different names"
            )
        depths.append(len(around))
        around.append((start, end, name))
    return depths


def kind(name: str) -> str:
    """Return the leading word of a name, without the number or label behind it."""
    word = re.match(r"[^\W\d]+", name)
    return word.group() if word else name or "?"


def text(log: EventLog, width: int = 100) -> str:
    """Return the log as lines of at most `width` characters, one per thread of a rank.

    An event is its name in brackets, or without them, or a run of its kind's letter, as room
    allows, at least one column long; inner events hide what is around them.
    """
    if width < 40:
        raise ValueError(f"a timeline needs 40 columns or more, not {width}")
    rows = tracks(log)
    if not rows:
        return "no events in the log"
    end = max(e.end for row in rows.values() for _, e in row)
    labels = [_shortened(label, width // 3) for label in _row_names(rows)]
    margin = max(map(len, labels)) + 1
    events = [e for row in rows.values() for _, e in row]
    letters = _letters([kind(e.name) for e in events])
    lines = [_axis(end, margin, width)]
    for label, row in zip(labels, rows.values(), strict=True):
        lines.append(label.ljust(margin) + _cells(row, end, width - margin, letters))
    for category in sorted({e.category for e in events}, key=lambda c: (c != "compute", c)):
        kinds = dict.fromkeys(kind(e.name) for e in events if e.category == category)
        pairs = [(letters[k], _printable(k)) for k in kinds]
        legend = ", ".join(a if a == word else f"{a} = {word}" for a, word in pairs)
        lines += textwrap.wrap(f"{_printable(category)}: {legend}", width, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in lines)


def _row_names(rows) -> list[str]:
    """Return a name per (rank, thread): the rank's alone if no rank has a second thread."""
    alone = all(thread == "main" for _, thread in rows)
    return [f"rank {rank}" if alone else f"rank {rank} {thread}" for rank, thread in rows]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def _shortened(name: str, room: int) -> str:
    name = _printable(name)
    return name if len(name) <= room else name[: room - 2] + ".."


def _letters(kinds: list[str]) -> dict[str, str]:
    """Return a character per kind: one of its own where that is free."""
    letters = {}
    for word in dict.fromkeys(kinds):
        own = [c for c in word[0] + word[0].swapcase() + word if c.isascii() and c.isalnum()]
        free = (c for c in [*own, *string.ascii_letters] if c not in letters.values())
        letters[word] = next(free, "#")
    return letters


def _axis(end: float, margin: int, width: int) -> str:
    """Return the scale: each mark is the column of the time behind it; the unit stands in front."""
    unit, factor = next(((u, f) for u, f in UNITS if end * f >= 1), UNITS[-1])
    end, columns = max(end * factor, 1e-3), width - margin
    steps = (m * 10.0**k for k in count(-6) for m in (1, 2, 5))
    step = next(step for step in steps if step / end * columns >= 10)
    line = unit.ljust(margin)
    for i in range(math.floor(end / step) + 1):
        mark = f"|{i * step:g}"
        at = margin + round(i * step / end * columns)
        if at + len(mark) <= width:
            line = line.ljust(at) + mark
    return line


def _cells(row: list[tuple[int, Event]], end: float, columns: int, letters: dict[str, str]) -> str:
    """Return one thread's line: outer events first, inner ones over them."""
    cells, scale = [None] * columns, columns / end if end else 0.0
    edge, limit = {0: 0}, {0: columns}  # per depth: where the last event ends, where the outer does
    for depth, e in row:
        start = min(round(e.start * scale), limit[depth] - 1)
        stop = min(max(round(e.end * scale), start + 1), limit[depth])
        if edge[depth] < stop:  # else both are shorter than a column, and the later one shows
            start = max(start, edge[depth])
        cells[start:stop] = [(e, stop - start)] * (stop - start)
        edge[depth], edge[depth + 1], limit[depth + 1] = stop, start, stop
    runs = [list(same) for _, same in groupby(cells, key=id)]
    return "".join(_run(run[0], len(run), letters) for run in runs)


def _run(cell: tuple[Event, int] | None, room: int, letters: dict[str, str]) -> str:
    """Return `room` characters: the name only if no inner event covers a part of the event."""
    if cell is None:
        return " " * room
    e, whole = cell
    name = _printable(e.name)
    if room < whole or not 0 < len(name) <= room:
        return letters[kind(e.name)] * room
    return f"[{name.center(room - 2, '-')}]" if len(name) + 2 <= room else name.ljust(room, "-")


def draw(log: EventLog, title: str | None = None) -> Any:
    """Return a figure: a row per thread of a rank, time in ms from zero; needs matplotlib.

    What happened inside an event hangs below it. Names, and bytes of communication, stand where
    they fit. Colour is meaning; communication is hatched as well.
    """
    plt = figures.pyplot()
    rows, tops, bottom = _layout(log)
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.36 * bottom))
    figure.suptitle(title or "", x=0.01, ha="left")
    end = max((e.end for row in rows.values() for _, e in row), default=0.0) * 1e3 or 1.0
    axes.set(xlim=(0, end), ylim=(bottom, 0), xlabel="time (ms)" if rows else "no events")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(
        [top + (_lanes(row) - 0.2) / 2 for top, row in zip(tops, rows.values(), strict=True)],
        _row_names(rows),
    )
    for top, row in zip(tops, rows.values(), strict=True):
        axes.axhspan(top - 0.1, top + _lanes(row) - 0.1, color="#F0F0F0", zorder=0)
    bars = [(top + d, e) for top, row in zip(tops, rows.values(), strict=True) for d, e in row]
    if any(d for row in rows.values() for d, _ in row):
        axes.set_title("in a grey row, a lower bar is a part of the one above it", fontsize=9)
    _legend(figure, plt, _bars(axes, bars, end))
    figure.draw_without_rendering()  # settles the layout, so that the room for names is known
    for y, e in bars:
        _write(figure, axes, y, e)
    return figure


def _layout(log: EventLog) -> tuple[dict, list[float], float]:
    """Return tracks(log), the y of each row's upper edge, and that of the picture's lower edge.

    A lane per depth is 1 high, of which a bar fills 0.8; ranks are further apart than threads.
    """
    rows, tops, y, before = tracks(log), [], 0.0, None
    for (rank, _), row in rows.items():
        y += 0.15 if rank == before else 0.5
        tops.append(y)
        y, before = y + _lanes(row), rank
    return rows, tops, y + 0.3


def _lanes(row: list[tuple[int, Event]]) -> int:
    return 1 + max(depth for depth, _ in row)


def meaning(e: Event) -> str:
    """Return the key of COLORS that tells what an event is."""
    if e.category == "communication":
        return "communication"
    word = SHORT.get(kind(e.name), kind(e.name))
    return word if word in COLORS else "compute"


def _bars(axes, bars: list[tuple[float, Event]], end: float) -> list[str]:
    """Draw a bar per (y, event), `end` ms in all; return the meanings that occur."""
    spans = {}
    for y, e in bars:
        span = (e.start * 1e3, max(e.seconds * 1e3, end / 500))  # an instant is seen too
        spans.setdefault((meaning(e), y), []).append(span)
    for (what, y), group in spans.items():
        axes.broken_barh(group, (y, 0.8), **_look(what))
    return [what for what in COLORS if any(what == found for found, _ in spans)]


def _look(what: str) -> dict:
    hatch = "////" if what == "communication" else None
    return {"facecolor": COLORS[what], "edgecolor": "white", "linewidth": 0.6, "hatch": hatch}


def _legend(figure, plt, meanings: list[str]) -> None:
    keys = [plt.Rectangle((0, 0), 1, 1, label=what, **_look(what)) for what in meanings]
    if keys:
        figure.legend(handles=keys, loc="outside lower right", ncols=len(keys), fontsize=9)


def _write(figure, axes, y: float, e: Event) -> None:
    """Write the longest text that fits into the bar of an event: name and bytes, name, kind."""
    (left, _), (right, _) = axes.transData.transform([(e.start * 1e3, y), (e.end * 1e3, y)])
    what = meaning(e)
    ink = "white" if what == "forward" else figures.INK
    texts = [f"{e.name}, {bytes_text(e.bytes)}"] if what == "communication" and e.bytes else []
    for words in [*texts, e.name, kind(e.name)] if right - left > 6 else []:
        middle = (e.start + e.end) / 2 * 1e3
        written = axes.text(middle, y + 0.4, words, color=ink, fontsize=8, parse_math=False)
        written.set(ha="center", va="center_baseline", clip_on=True)
        if what == "communication":
            written.set_bbox({"facecolor": COLORS[what], "edgecolor": "none", "pad": 1})
        if written.get_window_extent().width + 6 <= right - left:
            return
        written.remove()


def bytes_text(count: int) -> str:
    """Return bytes with three digits: "64 B", "1.05 MB"; a kB has 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000


def chrome_trace(log: EventLog) -> dict:
    """Return a Chrome trace: a process per rank, a complete event per event, times in us from zero.

    As on Linux, the main thread's tid is its pid, and no other thread's is: viewers list it first.
    """
    rows = tracks(log)
    others = sorted({thread for _, thread in rows if thread != "main"})
    first = 1 + max((rank for rank, _ in rows), default=0)
    found = []
    for index, ((rank, thread), row) in enumerate(rows.items()):
        tid = rank if thread == "main" else first + others.index(thread)
        found += _labels(rank, tid, thread, index) + [_complete(e, tid) for _, e in row]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _labels(rank: int, tid: int, thread: str, index: int) -> list[dict]:
    values = (f"rank {rank}", thread, rank, index)
    return [
        {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": {key: value}}
        for (name, (key, _)), value in zip(METADATA.items(), values, strict=True)
    ]


def _complete(e: Event, tid: int) -> dict:
    start, end = microseconds(e.start), microseconds(e.end)
    place = {"ph": "X", "name": e.name, "cat": e.category, "pid": e.rank, "tid": tid}
    return {**place, "ts": start, "dur": end - start, "args": {"bytes": int(e.bytes)}}


def save_chrome_trace(log: EventLog, path: str | Path) -> None:
    """Write the Chrome trace of a log as JSON, for https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(log), allow_nan=False), encoding="utf-8")


def check_chrome_trace(trace: dict) -> None:
    """Raise ValueError unless a trace has the form that `chrome_trace` gives it.

    Complete events with all keys, times from 0 in us, bytes from 0; on one (pid, tid) they nest or
    are disjoint, without tolerance; every pid and every (pid, tid) has a name.
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
    """Check that values[key] is there and of its type; numbers are finite and 0 or more."""
    value = values.get(key) if isinstance(values, dict) else None
    number = want in (int, float)
    types = (int, float) if want is float else want
    if not isinstance(value, types) or (number and isinstance(value, bool)):
        raise ValueError(f"{key!r} in {values!r} must be of type {want.__name__}")
    if number and not 0 <= value < math.inf:
        raise ValueError(f"{key!r} in {values!r} must be finite, 0 or more")
