"""An event log as a picture: as text, and as a figure. (`chrome_trace.py`: for Perfetto.)

    log = EventLog()
    minidist.run(worker, 2, log=log)
    print(timeline.text(log))
    timeline.draw(log)

A row is a thread of a rank, so communication beside compute shows as two rows busy at one time.
Events of one thread nest or are disjoint. Names may carry numbers and labels: "F0" is of the kind
"F", "all_reduce layer.weight" of the kind "all_reduce".
"""

import math
import re
import string
import textwrap
from itertools import count, groupby
from typing import Any

from minidist.events import Event, EventLog
from minidist.tools import figures
from minidist.tools.tracks import tracks

UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
COLORS = {  # compute: any other name; sky blue, of Okabe and Ito like the rest
    "compute": "#56B4E9",
    "forward": figures.FORWARD,
    "backward": figures.BACKWARD,
    "update": figures.UPDATE,
    "communication": figures.COMMUNICATION,
}
SHORT = {"F": "forward", "B": "backward", "U": "update"}


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
