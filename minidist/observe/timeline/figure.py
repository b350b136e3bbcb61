"""An event log as a figure.

Colours have meanings. In a program's figure a bar shows its micro-batch, a lighter shade is a later
chunk, and transfers, in which a rank mostly waits, are thin.
"""

from functools import cache
from typing import Any, NamedTuple

from minidist.events import Event, EventLog
from minidist.observe import style
from minidist.observe.chrome_trace import Tracks, tracks
from minidist.observe.timeline.lines import (
    MEANINGS,
    actions,
    chunks_of,
    is_drawn,
    is_program,
    kind,
    micro_batches,
    row_names,
)

WEIGHT = "#F0E442"  # yellow, and below sky blue and vermilion: of Okabe and Ito like the rest
COLORS = {
    "compute": "#56B4E9",  # any other name
    "forward": style.FORWARD,
    "backward": style.BACKWARD,
    MEANINGS["I"]: style.BACKWARD,
    MEANINGS["W"]: WEIGHT,
    "update": style.UPDATE,
    MEANINGS["R"]: "#D55E00",
    "communication": style.COMMUNICATION,
}
DARK = {style.FORWARD, style.UPDATE}  # colours on which white is read better than ink
WIDE = 50  # a program with this many events in a row gets a wider figure
SIZES = (8, 6.5, 5)  # of the numbers in a program's bars, in points: the first that fits in all


class Bar(NamedTuple):
    """An event, the y of its upper edge, and its style."""

    y: float
    height: float
    event: Event
    meaning: str
    shade: float = 0.0  # how much white is in the colour

    @property
    def color(self) -> tuple[float, ...]:
        """Red, green, blue."""
        parts = (int(COLORS[self.meaning][i : i + 2], 16) / 255 for i in (1, 3, 5))
        return tuple(part + (1 - part) * self.shade for part in parts)

    @property
    def ink(self) -> str:
        return "white" if COLORS[self.meaning] in DARK and self.shade < 0.3 else style.INK


def draw(log: EventLog, title: str | None = None) -> Any:
    """Return a figure: a row per thread of a rank, time from zero; needs matplotlib.

    What happened inside an event is drawn below it. Names, and bytes of communication, are written
    if they fit. Communication is also hatched.
    """
    plt = style.pyplot()
    rows, tops, bottom = _layout(log)
    program = is_program(rows)
    factor, unit = (1e3, "ms") if log.unit == "s" else (1, log.unit)
    width = 16 if program and max(map(len, rows.values())) > WIDE else 10
    figure, axes = plt.subplots(figsize=(width, 1.4 + 0.36 * bottom))
    figure.suptitle(title or "", x=0.01, ha="left")
    last = max((e.end for row in rows.values() for _, e in row), default=0.0)
    end = last * factor or 1.0
    _frame(axes, rows, tops, bottom, end)
    axes.set(xlabel=f"time ({unit})" if rows else "no events")
    bars = _bars(rows, tops, program)
    _fill(axes, bars, end, factor)
    _legend(figure, plt, bars)
    figure.draw_without_rendering()  # settles the layout, so that the room for names is known
    if program:
        _number(figure, axes, [bar for bar in bars if bar.meaning != "communication"], factor)
    else:
        for bar in bars:
            _write(axes, bar, factor)
    return figure


def draw_into(axes, log: EventLog) -> None:
    """Draw a program without transfers into axes, one of several: a row per rank, bars numbered.

    A later chunk's bars are lower, which is visible in print, too.
    """
    for event in log.events:
        (action,) = actions(event.name)
        height = 0.6 if action.chunk else 0.86
        bar = Bar(event.rank + 0.86 - height, height, event, meaning(event))
        _fill(axes, [bar], 0.5, 1)
        _centred(axes, bar, str(action.micro_batch), 8, 1)
    ranks = sorted({event.rank for event in log.events})
    axes.set_yticks([rank + 0.43 for rank in ranks], [f"rank {rank}" for rank in ranks], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks), -0.15)


def _frame(axes, rows: Tracks, tops: list[float], bottom: float, end) -> None:
    """Set the limits, and draw a grey strip with a name per row: what stays grey is idle."""
    axes.set(xlim=(0, float(end)), ylim=(bottom, 0))
    axes.tick_params(axis="y", length=0)
    axes.xaxis.get_major_locator().set_params(integer=end >= 4)
    heights = [_lanes(row) for row in rows.values()]
    middles = [top + (height - 0.2) / 2 for top, height in zip(tops, heights, strict=True)]
    axes.set_yticks(middles, row_names(rows))
    for top, height in zip(tops, heights, strict=True):
        axes.axhspan(top - 0.1, top + height - 0.1, color=style.ROW, zorder=0)
    if max(heights, default=1) > 1:
        axes.set_title("in a grey row, a lower bar is a part of the one above it", fontsize=9)


def _layout(log: EventLog) -> tuple[Tracks, list[float], float]:
    """Return tracks(log), the y of each row's upper edge, and the y of the picture's lower edge.

    Each depth has a lane of height 1, and a bar fills 0.8 of it; ranks are further apart than
    threads.
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
    """Return the key of COLORS for an event."""
    if e.category == "communication" and not actions(e.name):
        return "communication"
    word = MEANINGS.get(kind(e.name), kind(e.name))
    return word if word in COLORS else "compute"


def _bars(rows: Tracks, tops: list[float], program: bool) -> list[Bar]:
    """Return a bar per event; for a program, with shades for chunks and thin transfers."""
    placed = [(top + d, e) for top, row in zip(tops, rows.values(), strict=True) for d, e in row]
    if not program:
        return [Bar(y, 0.8, e, meaning(e)) for y, e in placed]
    step = 0.6 / max(1, chunks_of(rows) - 1)
    return [
        Bar(y + 0.3, 0.2, e, meaning(e))
        if not is_drawn(e)
        else Bar(y, 0.8, e, meaning(e), step * actions(e.name)[0].chunk)
        for y, e in placed
    ]


def _fill(axes, bars: list[Bar], end, factor) -> None:
    """Draw the bars; all bars of one style in one row are one collection."""
    spans: dict[tuple, list[tuple[float, float]]] = {}
    for bar in bars:
        start, length = bar.event.start * factor, bar.event.seconds * factor
        span = float(start), float(max(length, end / 500))  # an instant is visible too
        spans.setdefault((bar.y, bar.height, bar.meaning, bar.color), []).append(span)
    for (y, height, what, color), group in spans.items():
        axes.broken_barh(group, (y, height), **_look(what, color))


def _look(what: str, color) -> dict:
    hatch = "////" if what == "communication" else None
    return {"facecolor": color, "edgecolor": "white", "linewidth": 0.6, "hatch": hatch}


def _legend(figure, plt, bars: list[Bar]) -> None:
    """Add a legend entry per meaning that occurs, with all its shades."""
    from matplotlib.legend_handler import HandlerTuple

    styles = {(bar.meaning, bar.shade): bar for bar in bars}
    keys = {
        what: tuple(
            plt.Rectangle((0, 0), 1, 1, **_look(what, bar.color))
            for (other, _), bar in sorted(styles.items())
            if other == what
        )
        for what in COLORS
    }
    keys = {what: key for what, key in keys.items() if key}
    shades = max(map(len, keys.values()), default=1)
    labels = [
        what + (f" (chunks {', '.join(map(str, range(shades)))})" if len(key) > 1 else "")
        for what, key in keys.items()
    ]
    if keys:
        together = {tuple: HandlerTuple(ndivide=None, pad=0)}
        figure.legend(
            list(keys.values()),
            labels,
            handler_map=together,
            loc="outside lower right",
            ncols=len(keys),
            fontsize=9,
        )


def _room(axes, bar: Bar, factor) -> float:
    """Return the width of a bar in pixels."""
    ends = [(float(t * factor), bar.y) for t in (bar.event.start, bar.event.end)]
    (left, _), (right, _) = axes.transData.transform(ends)
    return right - left


def _centred(axes, bar: Bar, label: str, size: float, factor) -> Any:
    middle = float((bar.event.start + bar.event.end) / 2 * factor)
    written = axes.text(middle, bar.y + bar.height / 2, label, color=bar.ink, fontsize=size)
    written.set(ha="center", va="center_baseline", clip_on=True, parse_math=False)
    return written


def _number(figure, axes, bars: list[Bar], factor) -> None:
    """Write micro-batches where they fit, all in the largest size in which nearly all fit."""

    @cache
    def width(label: str, size: float) -> float:
        probe = figure.text(0, 0, label, fontsize=size)
        pixels = probe.get_window_extent().width
        probe.remove()
        return pixels

    numbers = [(b, micro_batches(actions(b.event.name)), _room(axes, b, factor) - 2) for b in bars]

    def fits(size: float) -> list:
        return [(bar, label) for bar, label, room in numbers if width(label, size) <= room]

    most = 0.9 * len(fits(SIZES[-1]))
    size = next(size for size in SIZES if len(fits(size)) >= most)
    for bar, label in fits(size):
        _centred(axes, bar, label, size, factor)


def _write(axes, bar: Bar, factor) -> None:
    """Write the longest text that fits into an event's bar: name and bytes, name, or kind."""
    e, room = bar.event, _room(axes, bar, factor)
    if room <= 6:
        return
    communicates = bar.meaning == "communication"
    texts = [f"{e.name}, {bytes_text(e.bytes)}"] if communicates and e.bytes else []
    for label in [*texts, e.name, kind(e.name)]:
        written = _centred(axes, bar, label, 8, factor)
        if communicates:
            written.set_bbox({"facecolor": bar.color, "edgecolor": "none", "pad": 1})
        if written.get_window_extent().width + 6 <= room:
            return
        written.remove()


def bytes_text(count: int) -> str:
    """Return bytes with three digits: "64 B", "1.05 MB"; a kB has 1000."""
    number, units = float(count), ["B", "kB", "MB", "GB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.3g} {units[0]}"
