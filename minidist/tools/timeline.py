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
    # Of two equal intervals the outer one ended last, hence was logged last.
    for e in sorted(reversed(log.from_zero().events), key=lambda e: (e.start, -e.end)):
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
    allows, and at least one column; inner events hide what is around them.
    """
    if width < 40:
        raise ValueError(f"a timeline needs 40 columns or more, not {width}")
    rows = tracks(log)
    if not rows:
        return "no events in the log"
    end = max(e.end for row in rows.values() for _, e in row)
    labels = [_shortened(f"rank {rank} {thread}", width // 3) for rank, thread in rows]
    margin = max(map(len, labels)) + 1
    events = [e for row in rows.values() for _, e in row]
    letters = _letters([kind(e.name) for e in events])
    lines = [_axis(end, margin, width)]
    for label, row in zip(labels, rows.values(), strict=True):
        lines.append(label.ljust(margin) + _cells(row, end, width - margin, letters))
    for category in sorted({e.category for e in events}, key=lambda c: (c != "compute", c)):
        kinds = dict.fromkeys(kind(e.name) for e in events if e.category == category)
        legend = ", ".join(f"{letters[k]} = {_printable(k)}" for k in kinds)
        lines += textwrap.wrap(f"{_printable(category)}: {legend}", width, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in lines)


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def _shortened(name: str, room: int) -> str:
    return name if len(name) <= room else name[: room - 2] + ".."


def _letters(kinds: list[str]) -> dict[str, str]:
    """Return a character per kind: one of its own where that is free."""
    letters = {}
    for word in dict.fromkeys(kinds):
        own = [c for c in word + word.swapcase() if c.isascii() and c.isalnum()]
        free = (c for c in [*own, *string.ascii_letters] if c not in letters.values())
        letters[word] = next(free, "#")
    return letters


def _axis(end: float, margin: int, width: int) -> str:
    """Return the scale: each mark is the column of the time behind it; the unit stands in front."""
    unit, factor = next(((u, f) for u, f in UNITS if end * f >= 1), UNITS[-1])
    end, columns = max(end * factor, 1e-3), width - margin
    steps = (m * 10.0**k for k in count(-6) for m in (1, 2, 5))
    step = next(step for step in steps if step / end * columns >= 10)
    line = f"time ({unit})"[: margin - 1].ljust(margin)
    for i in range(math.floor(end / step) + 1):
        mark = f"|{i * step:g}"
        at = margin + int(i * step / end * columns)
        if at + len(mark) <= width:
            line = line.ljust(at) + mark
    return line


def _cells(row: list[tuple[int, Event]], end: float, columns: int, letters: dict[str, str]) -> str:
    """Return one thread's line. Inner and short events are painted last, over what is there."""
    cells, scale = [None] * columns, columns / end if end else 0.0
    for _, e in sorted(row, key=lambda item: (item[0], -item[1].seconds)):
        start = min(int(e.start * scale), columns - 1)
        stop = min(max(int(e.end * scale), start + 1), columns)
        cells[start:stop] = [e] * (stop - start)
    line, named = "", set()
    for _, same in groupby(cells, key=id):
        e, *rest = same
        line += _run(e, len(rest) + 1, letters, named)
    return line


def _run(e: Event | None, room: int, letters: dict[str, str], named: set[int]) -> str:
    """Return what fills one run of an event's columns; the first with room shows its name."""
    if e is None:
        return " " * room
    name = _printable(e.name)
    if id(e) in named or not 0 < len(name) <= room:
        return letters[kind(e.name)] * room
    named.add(id(e))
    return f"[{name.center(room - 2, '-')}]" if len(name) + 2 <= room else name.ljust(room, "-")


def draw(log: EventLog, title: str | None = None):
    """Return a figure: a row per thread of a rank, time in ms from zero; needs matplotlib.

    What happened inside an event hangs below it. Names, and bytes of communication, stand where
    they fit. Colour is meaning; communication is hatched as well.
    """
    plt = figures.pyplot()
    rows = tracks(log)
    lanes = [max(depth for depth, _ in row) + 1 for row in rows.values()]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.38 * sum(lanes) + 0.12 * len(lanes)))
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left")
    axes.set_xlabel("time (ms)" if rows else "no events in the log")
    placed, top, before = [], 0.0, None
    ticks = []
    for (rank, thread), row in rows.items():
        if before not in (None, rank):
            axes.axhline(top + 0.1, color=figures.IDLE, linewidth=0.8)
        top, before = top + (0.3 if before == rank else 0.45), rank
        placed += [(top + depth, e) for depth, e in row]
        ticks.append((top + max(depth for depth, _ in row) / 2 + 0.4, f"rank {rank}  {thread}"))
        top += max(depth for depth, _ in row) + 0.8
    end = max((e.end for _, e in placed), default=1e-3) * 1e3 or 1e-3
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    axes.set(xlim=(0, end), ylim=(top + 0.3, 0))
    axes.tick_params(axis="y", length=0)
    for meaning in dict.fromkeys(_meaning(e) for _, e in placed):
        pass
    return figure


def _meaning(e: Event) -> str:
    """Return the key of COLORS that tells what an event is."""
    if e.category == "communication":
        return "communication"
    word = SHORT.get(kind(e.name), kind(e.name))
    return word if word in COLORS else "compute"
