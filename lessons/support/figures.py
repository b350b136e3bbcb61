"""The figures of the lessons: their common style, and where they are saved.

    def draw(plt):
        figure, axes = plt.subplots()
        axes.plot(x, y, color=figures.FORWARD)
        return figure

    figures.show(draw, "00_single_device", caption="What one sees.", alt="What a reader who cannot
        see it has to know.")

The colours and the style are those of minidist/observe/style.py.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.events import EventLog
from minidist.observe.style import (
    BACKWARD,
    COMMUNICATION,
    EMPHASIS,
    FORWARD,
    IDLE,
    INK,
    OWN,
    ROW,
    SAME,
    UPDATE,
    in_notebook,
    pyplot,
)

__all__ = [
    "BACKWARD",
    "COMMUNICATION",
    "EMPHASIS",
    "FORWARD",
    "IDLE",
    "INK",
    "OWN",
    "SAME",
    "UPDATE",
    "columns",
    "in_notebook",
    "label_ends",
    "matrix",
    "numbers_and_losses",
    "part",
    "pyplot",
    "rank_bars",
    "show",
    "stack",
]


def show(draw: Callable[[Any], Any], name: str, caption: str, alt: str) -> Any:
    """Show the figure that draw(pyplot) returns: in a notebook below the cell, else as a file.

    A script saves it as `name`.png and `name`.svg and prints where: in `--figures DIR`, or else in
    a new temporary folder. Without matplotlib one printed line says that there is no figure.
    `caption` and `alt`, the text for who cannot see it, are on the page that is made of the lesson.
    """
    try:
        plt = pyplot()
    except ValueError as missing:
        print(f"no figure: {missing}")
        return None
    if in_notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg")
        figure = draw(plt)
        plt.close(figure)  # the cell's value shows it; open, it would be shown twice
        return figure
    from . import command_line

    folder = command_line().parse_known_args()[0].figures
    path = (folder or Path(tempfile.mkdtemp(prefix="minidist-"))) / name
    figure = draw(plt)
    # no version, no date: the same data, the same bytes
    figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    plt.rcParams["svg.hashsalt"] = name
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    print(f"figure: {path}.png and .svg: {caption}")
    return None


def part(rank: int) -> dict[str, Any]:
    """Return the style of a patch that belongs to one rank: one colour, and a hatch per rank."""
    return {"facecolor": OWN, "edgecolor": "white", "hatch": (None, "///", "...", "xx")[rank % 4]}


def stack(axes, y: float, pieces: list[tuple[float, str, dict]], height: float = 0.7) -> None:
    """Draw bars end to end from zero, in the row y: (length, label, style) each."""
    start = 0.0
    for length, words, look in pieces:
        axes.barh(y, length, height, start, **{"edgecolor": "white"} | look)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1} if "hatch" in look else None
        middle = {"ha": "center", "va": "center", "fontsize": 9, "bbox": paper if words else None}
        axes.text(start + length / 2, y, words, **middle)
        start += length


def columns(axes, parts: dict[Any, dict[str, float]], colors: list[str]) -> None:
    """Draw a column per entry, cut into shares of 100 %; beside the first one their names."""
    for x, sizes in enumerate(parts.values()):
        start, whole = 0.0, sum(sizes.values()) / 100
        for (name, size), color in zip(sizes.items(), colors, strict=True):
            share, ink = size / whole, "white" if color in (FORWARD, UPDATE) else INK
            axes.bar(x, share, 0.85, start, color=color, edgecolor="white")
            words, middle = f"{share:.0f} %" if share >= 4.5 else "", start + share / 2
            axes.text(x, middle, words, ha="center", va="center", fontsize=9, color=ink)
            axes.text(-0.5, middle, "" if x else name, ha="right", va="center")
            start += share
    axes.set(xticks=range(len(parts)), xticklabels=list(parts), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def matrix(axes, left: float, bottom: float, size: tuple, columns: int = 1, rows: int = 1) -> None:
    """Draw a matrix of size (width, height) in parts labelled by rank; uncut: the same on all."""
    from matplotlib.patches import Rectangle

    width, height = size[0] / columns, size[1] / rows
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for rank in range(columns * rows):
        corner = left + rank % columns * width, bottom + (rows - 1 - rank // columns) * height
        look = part(rank) if columns * rows > 1 else {"facecolor": SAME, "edgecolor": "white"}
        axes.add_patch(Rectangle(corner, width, height, **look))
        if columns * rows > 1:
            middle = corner[0] + width / 2, corner[1] + height / 2
            axes.text(*middle, rank, ha="center", va="center", fontsize=10, bbox=paper)


def rank_bars(axes, log: EventLog, scale: float = 1.0, numbered: bool = True) -> None:
    """Draw what the ranks of a pipeline compute: a row per rank, grey where it is idle.

    Time begins with the first action. Call axes.legend() afterwards to explain the colours.

    log       of a simulation or of a run; its compute events are named F0, B0, U0
    scale     units of the axis per unit of the log's time: 1e3 shows seconds as ms
    numbered  write micro-batches into the bars
    """
    meanings = {"F": ("forward", FORWARD), "B": ("backward", BACKWARD), "U": ("update", UPDATE)}
    log = EventLog([e for e in log.events if e.category == "compute"]).from_zero()
    rows, end = range(1 + max(e.rank for e in log.events)), max(e.end for e in log.events)
    axes.barh(rows, scale * float(end), 0.8, color=ROW)
    labels = set()
    for e in log.events:
        label, color = meanings[e.name[0].upper()]
        start, length = scale * float(e.start), scale * float(e.seconds)
        style = {"color": color, "edgecolor": "white", "linewidth": 0.6}
        style["hatch"] = "////" if label == "update" else None  # in grey it is like forward
        axes.barh(e.rank, length, 0.8, start, label=None if label in labels else label, **style)
        labels.add(label)
        if numbered and label != "update":
            ink = "white" if label == "forward" else INK
            place = {"ha": "center", "va": "center_baseline", "fontsize": 8}
            axes.text(start + length / 2, e.rank, e.name[1:], color=ink, **place)
    axes.set(xlim=(0, scale * float(end)), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(rows, [f"rank {r}" for r in rows])
    axes.tick_params(axis="y", length=0)


def label_ends(axes, x: float, ends: dict[str, tuple[float, str]], gap: float) -> None:
    """Write the name of each line at its end, `gap` apart or more; ends: {name: (y, colour)}."""
    at = float("-inf")
    for name, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        at = max(y, at + gap)
        axes.text(x, at, name, color=color, va="center", fontsize=9)


def numbers_and_losses(plt, gradients, formats: dict[str, tuple], runs: dict[str, tuple]) -> Any:
    """Draw how large gradients are and what formats hold; and the losses of some runs.

    gradients  an array, of the loss that is divided by a rank's images; 2^14 ranks have others
    formats    {name: (significant bits, smallest and largest number)}
    runs       {name: (weights, losses, share of right answers)}
    """
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    left.hist(np.log2(abs(gradients)), range(-40, 0), color=OWN)
    left.hist(np.log2(abs(gradients)) - 14, range(-40, 0), color=IDLE, alpha=0.7)
    left.text(-3, 800, "divided by the\nrank's images")
    left.text(-39, 800, "divided by\nall images")
    for row, (name, (_, smallest, largest)) in enumerate(formats.items(), start=1):
        begin, end = np.clip(np.log2([smallest, largest]), -40, 16)
        left.barh(-110 * row, end - begin, 100, begin, color=FORWARD)
        left.text(end - 0.5, -110 * row, name, color="white", ha="right", va="center", fontsize=9)
    left.set(yticks=[], xlabel="log2 of a gradient's size", title="Gradients; what formats hold")
    for _, losses, _ in runs.values():
        right.plot(losses, color=FORWARD)
    label_ends(right, 405, {name: (run[1][-1], INK) for name, run in runs.items()}, 0.09)
    right.set(xlabel="step", title="Loss", xlim=(0, 680), xticks=range(0, 401, 100))
    return figure
