"""An event log as lines of text; and the meaning of events' names, also for the figure.

A row is a thread of a rank, so communication during compute is visible as two rows busy at the same
time. Names may have numbers and labels: "F3.1" is an action, "all_reduce w" an all_reduce.

A log is a *program's* if all its compute events are actions of `pipeline_parallel/actions.py`, from
a simulator or from a run. It is drawn as in the papers on pipelines: a row per rank, a cell per
action with its micro-batch. If simulated, a cell's width is exactly its duration. Several actions
in one event, "W0 W1 W2", were done together. R is drawn like them, though it is communication.
"""

import math
import re
import string
import textwrap
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, groupby

from minidist.errors import WrongInput
from minidist.events import Event, EventLog
from minidist.observe.chrome_trace import Tracks, tracks
from minidist.pipeline_parallel.actions import Action, Reduce
from minidist.pipeline_parallel.text import read_action

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "input half of backward",
    "W": "weight half of backward",
    "U": "update",
    "R": "sum over ranks",
}


def actions(name: str) -> list[Action]:
    """Return the actions that an event's name lists; none if it names something else."""
    names = name.split(" ")
    listed = [action for word in names if (action := read_action(word))]
    return listed if len(listed) == len(names) else []


def kind(name: str) -> str:
    """Return the leading word of a name, without the number or label after it."""
    word = re.match(r"[<>]?[^\W\d]+", name)
    return word.group() if word else name or "?"


def is_drawn(e: Event) -> bool:
    """Return whether a program's picture has this event as an action."""
    return e.category == "compute" or bool(actions(e.name))


def is_program(rows: Tracks) -> bool:
    """Return whether all compute events are actions, none of them inside another event."""
    computed = [(d, e) for row in rows.values() for d, e in row if e.category == "compute"]
    return bool(computed) and all(depth == 0 and actions(e.name) for depth, e in computed)


def chunks_of(rows: Tracks) -> int:
    """Return how many chunks of a model each rank of a program holds."""
    names = {e.name for row in rows.values() for _, e in row if e.category == "compute"}
    return 1 + max(a.chunk for name in names for a in actions(name))


def micro_batches(run: list[Action]) -> str:
    """Return the numbers of actions done together: "3", "0-2", "0,2,3"; of R there are none."""
    numbers = [a.micro_batch for a in run if not isinstance(a, Reduce)]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))  # the first in which the end is 1 or more
FILL = {"F": "-", "B": "=", "I": "=", "W": "~", "U": "+", "R": "#"}  # behind the name of an action
IDLE = "."
PARTS = 8  # a picture of more parts, one below the other, is scaled down instead


def row_names(rows: Tracks) -> list[str]:
    """Return a name per (rank, thread): the rank's alone if no rank has a second thread."""
    alone = all(thread == "main" for _, thread in rows)
    return [f"rank {rank}" if alone else f"rank {rank} {thread}" for rank, thread in rows]


@dataclass(frozen=True)
class Scale:
    """How time becomes columns: `room` of them side by side, the others below."""

    columns: int
    per_unit: Fraction | float
    room: int
    exact: bool = False

    def column(self, time) -> int:
        return round(time * self.per_unit)


def text(log: EventLog, width: int = 100, end=None) -> str:
    """Return the log as lines of at most `width` characters, one per thread of a rank.

    An event is drawn as its name in brackets, its name alone, or repeated letters of its kind, as
    room allows, and is at least one column long; inner events hide outer ones. An action of a
    program is its name and a filling, F0-- or B0==; dots mean that the rank idles or waits for a
    transfer. The last lines explain the letters and the length of a column.

    end  the end of all rows; set it to give two pictures the same scale
    """
    if width < 40:
        raise WrongInput(f"a timeline needs 40 columns or more, not {width}")
    rows = tracks(log)
    if not rows:
        return "no events in the log"
    end = max(0 if end is None else end, *(e.end for row in rows.values() for _, e in row))
    unit, factor = _unit(end, log.unit)
    labels = [_shortened(label, width // 3) for label in row_names(rows)]
    margin = max(len(label) for label in (*labels, unit)) + 1
    room, names = width - margin, {}
    scale = Scale(room, room / float(end) if end else 0.0, room)
    if is_program(rows):
        for place, row in rows.items():  # without transfers; a rank of transfers alone keeps them
            rows[place] = [(d, e) for d, e in row if is_drawn(e)] or row
        names = _short_names(rows)
        scale = (log.unit != "s" and _exact(rows, names, end, room)) or scale
    events = [e for row in rows.values() for _, e in row]
    letters = _letters([kind(e.name) for e in events])
    lines = [_cells(row, scale, letters, names) for row in rows.values()]
    axes = [_axis(scale, first, end, factor) for first in range(0, scale.columns, scale.room)]
    result = _parts([unit, *labels], axes, lines, scale.room, margin)
    legend = _key(events, names, scale, unit, factor) if names else []
    legend += _legend([e for e in events if e.name not in names], letters)
    for line in legend:
        result += textwrap.wrap(line, width, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in result)


def _parts(labels: list[str], axes: list[str], lines: list[str], room: int, margin: int) -> list:
    """Return the lines cut into parts of `room` columns, one below the other, with their axes."""
    result = []
    for part, axis in enumerate(axes):
        cut = [axis, *(line[part * room : (part + 1) * room] for line in lines)]
        shown = [a.ljust(margin) + b for a, b in zip(labels, cut, strict=True)]
        result += [*([""] if part else []), *shown]
    return result


def _unit(end, unit: str) -> tuple[str, float]:
    """Return the unit of the scale, and how many of these make one unit of the log."""
    if unit != "s":
        return _printable(unit), 1
    return next(((u, f) for u, f in UNITS if end * f >= 1), UNITS[-1])


def _short_names(rows: Tracks) -> dict[str, str]:
    """Return the names to write for actions; the second of two chunks is in lower case."""
    names, two = {}, chunks_of(rows) == 2
    for e in (e for row in rows.values() for _, e in row if is_drawn(e)):
        run = actions(e.name)
        name = run[0].sign + micro_batches(run)
        if two:
            names[e.name] = name.lower() if run[0].chunk else name
        else:
            names[e.name] = name + (f".{run[0].chunk}" if run[0].chunk else "")
    return names


def _exact(rows: Tracks, names: dict[str, str], end, room: int) -> Scale | None:
    """Return a scale on which all times are whole columns and all names fit, or None."""
    cells = [e for row in rows.values() for _, e in row]
    times = {t: Fraction(t).limit_denominator(1000) for e in cells for t in (e.start, e.end, end)}
    if any(abs(t - near) > 1e-9 * max(1, end) for t, near in times.items()):
        return None
    step = math.lcm(*(near.denominator for near in times.values()))
    widths = {(times[e.end] - times[e.start], len(names.get(e.name, "."))) for e in cells}
    widths = {(length, size) for length, size in widths if length}
    for gap, parts in ((1, 1), (0, PARTS)):
        per_unit = step * max(math.ceil((size + gap) / (step * length)) for length, size in widths)
        columns = int(per_unit * times[end])
        if columns <= parts * room:
            whole = per_unit * max(1, room // per_unit) if per_unit <= room else room
            return Scale(columns, per_unit, min(columns, whole), True)
    return None


def _key(events: list[Event], names: dict[str, str], scale: Scale, unit: str, factor) -> list[str]:
    """Return lines that explain the letters of a program, and the scale."""
    runs = [actions(e.name) for e in events if e.name in names]
    signs = {run[0].sign for run in runs}
    meanings = [f"{sign} {meaning}" for sign, meaning in MEANINGS.items() if sign in signs]
    lower = ["lower case: chunk 1"] if max(a.chunk for run in runs for a in run) == 1 else []
    if scale.exact:
        parts = math.ceil(scale.columns / scale.room)
        size = f"{scale.per_unit} columns are 1 {unit.removesuffix('s')}"
        size += f"; in {parts} parts, one below the other" if parts > 1 else ""
    else:
        size = f"scaled: 1 column is {factor / scale.per_unit:.2g} {unit}"
    return [", ".join([*meanings, f"{IDLE} idle", *lower]), size]


def _legend(events: list[Event], letters: dict[str, str]) -> list[str]:
    """Return, per category, which kinds the letters stand for."""
    lines = []
    for category in sorted({e.category for e in events}, key=lambda c: (c != "compute", c)):
        kinds = dict.fromkeys(kind(e.name) for e in events if e.category == category)
        pairs = [(letters[k], _printable(k)) for k in kinds]
        legend = ", ".join(a if a == word else f"{a} = {word}" for a, word in pairs)
        lines.append(f"{_printable(category)}: {legend}")
    return lines


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def _shortened(name: str, room: int) -> str:
    name = _printable(name)
    return name if len(name) <= room else name[: room - 2] + ".."


def _letters(kinds: list[str]) -> dict[str, str]:
    """Return a character per kind: a letter of its name if one is free."""
    letters: dict[str, str] = {}
    for word in dict.fromkeys(kinds):
        in_word = [c for c in word[0] + word[0].swapcase() + word if c.isascii() and c.isalnum()]
        free = (c for c in [*in_word, *string.ascii_letters] if c not in letters.values())
        letters[word] = next(free, "#")
    return letters


def _axis(scale: Scale, first: int, end, factor) -> str:
    """Return the scale above columns from `first`: a mark is at the column of the time after it."""
    steps = (m * 10.0**k for k in count(-6) for m in (1, 2, 5))
    step = next(step for step in steps if step / factor * scale.per_unit >= 10 or not end)
    line = ""
    for i in range(math.floor(end * factor / step) + 1):
        mark, at = f"|{i * step:g}", scale.column(i * step / factor) - first
        if at >= 0 and at + len(mark) <= scale.room:
            line = line.ljust(at) + mark
    return line


def _cells(row: list[tuple[int, Event]], scale: Scale, letters: dict, names: dict) -> str:
    """Return one thread's line: outer events first, inner ones over them."""
    cells: list[tuple[Event, int] | None] = [None] * scale.columns
    edge, limit = {0: 0}, {0: scale.columns}  # per depth: ends of the last event, of the outer one
    for depth, e in row:
        start = min(scale.column(e.start), limit[depth] - 1)
        stop = min(max(scale.column(e.end), start + 1), limit[depth])
        if edge[depth] < stop:  # else both are shorter than a column, and the later one is shown
            start = max(start, edge[depth])
        cells[start:stop] = [(e, stop - start)] * (stop - start)
        edge[depth], edge[depth + 1], limit[depth + 1] = stop, start, stop
    runs = [list(same) for _, same in groupby(cells, key=id)]
    return "".join(_event_text(run[0], len(run), letters, names) for run in runs)


def _event_text(cell: tuple[Event, int] | None, room: int, letters: dict, names: dict) -> str:
    """Return `room` characters: the name only if no inner event covers a part of the event."""
    if cell is None:
        return (IDLE if names else " ") * room
    e, whole = cell
    if e.name in names:
        name, sign = names[e.name], names[e.name][0]
        return name.ljust(room, FILL[sign.upper()]) if len(name) <= room else sign * room
    name = _printable(e.name)
    if room < whole or not 0 < len(name) <= room:
        return letters[kind(e.name)] * room
    return f"[{name.center(room - 2, '-')}]" if len(name) + 2 <= room else name.ljust(room, "-")
