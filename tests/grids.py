"""Which cases of a grid run: `@pytest.mark.grid(40)` on a parametrised test says how many.

Every two values of two parameters meet in one of them, if the number allows it; which cases these
are the commit decides, so that each commit tries others. `--all` runs all.
"""

import subprocess
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

Row = dict[str, Hashable]


@cache
def commit() -> str:
    """Return the commit that is checked out, which seeds what is drawn; "" where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def some(cases: Sequence, count: int, name: str) -> list:
    """Return `count` of these, in their order; the commit and the name decide which."""
    drawn = Random(f"{commit()} {name}").sample(range(len(cases)), min(count, len(cases)))
    return [cases[i] for i in sorted(drawn)]


def covering(rows: Sequence[Row], count: int, seed: str) -> list[int]:
    """Return which `count` rows run: each next one has most pairs of values that none had."""
    waiting = Random(seed).sample(range(len(rows)), len(rows))
    pairs = [set(combinations(sorted(row.items(), key=str), 2)) for row in rows]
    met: set[tuple] = set()
    chosen: list[int] = []
    while waiting and len(chosen) < count:
        best = max(waiting, key=lambda i: len(pairs[i] - met))
        waiting.remove(best)
        chosen.append(best)
        met |= pairs[best]
    return sorted(chosen)


def row_of(params: dict[str, object]) -> Row:
    """Return a case's parameters, with the entries of tuples and dicts as columns of their own."""
    row: Row = {}
    for name, value in params.items():
        if isinstance(value, dict):
            row |= row_of({f"{name} {key}": entry for key, entry in value.items()})
        elif isinstance(value, tuple | list):
            row |= row_of({f"{name} {i}": entry for i, entry in enumerate(value)})
        else:
            row[name] = getattr(value, "__name__", None) or str(value)
    return row


def left_out(items: list) -> set:
    """Return the items of grids that do not run at this commit."""
    grids = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("grid")) is not None:
            grids[item.nodeid.split("[")[0], mark.args[0]].append(item)
    result = set()
    for (name, count), cases in grids.items():
        rows = [row_of(item.callspec.params) for item in cases]
        chosen = covering(rows, count, f"{commit()} {name}")
        result |= set(cases) - {cases[i] for i in chosen}
    return result
