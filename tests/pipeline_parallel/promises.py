"""What the docstrings of schedules promise: pictures, idle times, stash. All numbers are exact."""

from operator import eq

import pytest

from minidist.planning import simulate
from tests.planning.test_closed_forms import made

FEW = [1, 2, 3, 4]
ranks = pytest.mark.parametrize("ps", [FEW, pytest.param(range(1, 9), marks=pytest.mark.slow)])


def in_docstring(module):
    """Return the rows of the picture in a module's docstring."""
    return [line[13:].rstrip() for line in module.__doc__.split("\n") if line[4:9] == "rank "]


def drawn(programs, *durations):
    """Return a row per rank: three columns per unit of time, "&" between the two of a pair."""
    forwards = {(rank, str(forward)) for rank, forward, _ in programs.pairs}
    rows = [""] * len(programs)
    for e in sorted(simulate(programs, *durations).timeline.events, key=lambda e: e.start):
        name, _, chunk = e.name.partition(".")
        name = name.lower() if chunk else name
        start, width = (int(3 * time) for time in (e.start, e.seconds))
        cell = name.ljust(width - 1, "-") + ("&" if (e.rank, e.name) in forwards else "")
        rows[e.rank] = rows[e.rank].ljust(start) + cell
    return rows


def assert_idles(schedule, p, m, times, formula, chunks=1, relation=eq):
    """Assert that every rank idles as long as the formula says, or longer."""
    found = simulate(made(schedule, p, m, chunks), *times)
    idle = found.makespan - m * sum(times)
    assert found.busy == [m * sum(times)] * p
    assert relation(idle, formula), (
        f"{schedule}, p = {p}, m = {m}, {chunks} chunks, (TF, TI, TW) = {times}: every rank idles "
        f"{idle} units; by the formula {'' if relation is eq else 'more than '}{formula}"
    )


def assert_stash(schedule, p, m, formula, chunks=1):
    """Assert that the peak stash of every rank is the formula's, in stages."""
    found = simulate(made(schedule, p, m, chunks), 2, 1, 3).peak_stash
    assert found == [formula] * p, (
        f"{schedule}, p = {p}, m = {m}, {chunks} chunks: ranks stash {', '.join(map(str, found))} "
        f"stages at their peaks, not {formula}"
    )
