"""What the actions of simulated programs wait for, the longest chain of them, and what is kept.

    1F1B, p = 2, m = 2      rank 0   F0 F1 .. B0 .... B1        critical: F0 of rank 0; F0 B0 F1 B1
    TF = 1, TB = 2          rank 1   .. F0 B0 F1 B1 ....        of rank 1; B1 of rank 0

An action begins when its rank is free, or when a message arrives, whichever is later. So a walk
back from the end, each time to what was later, reaches time 0: the makespan is the sum of what is
on the way, and nothing else would make it shorter.
"""

from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Transfer,
    placement_of,
)
from minidist.pipeline_parallel.execution_order import dependencies
from minidist.planning.replay import Time, divided
from minidist.planning.simulator import Simulation

Place = tuple[int, int]  # a rank, and the index of an action in its list
Moments = list[list[tuple[Time, Time, Time]]]  # per place: start, end, when its rank goes on


def moments(simulation: Simulation) -> Moments:
    """Return when every action but transfers runs; runs the replay again.

    A rank goes on at the end, or after the overhead of a send; at the start of an R.
    """
    found: Moments = [[] for _ in simulation.busy]

    def see(r: int, action: Action, start: Time, end: Time, clock: Time, *more) -> None:
        if not isinstance(action, Transfer):
            found[r].append((start, end, clock))

    simulation.replay(see)
    return found


def needs(programs: list[list[Action]]) -> list[list[list[Place]]]:
    """Return, for every action of programs without transfers, whose results it needs."""
    needed, gives = dependencies(programs)
    steps = [(r, i, action) for r, own in enumerate(programs) for i, action in enumerate(own)]
    places = {gives(r, action): (r, i) for r, i, action in steps}
    found: list[list[list[Place]]] = [[] for _ in programs]
    for r, _, action in steps:
        found[r].append(sorted(places[fact] for fact in needed(r, action)))
    return found


def waits(needs: list[list[list[Place]]], moments: Moments) -> list[list[Place | None]]:
    """Return for which action each one waited; None where it began when its rank was free."""
    result: list[list[Place | None]] = [[] for _ in needs]
    for r, (row, own) in enumerate(zip(needs, moments, strict=True)):
        free: Time = 0
        for needed, (start, _, clock) in zip(row, own, strict=True):
            others = [(moments[q][i][2], (q, i)) for q, i in needed if q != r]
            result[r].append(max(others)[1] if others and start > free else None)
            free = clock
    return result


def critical_path(waits: list[list[Place | None]], moments: Moments) -> list[Place]:
    """Return the places of a longest chain, from time 0 to the makespan.

    Between two of them is nothing, the overhead of a send, or the latency of a message.
    """
    r = max(range(len(moments)), key=lambda r: moments[r][-1][2])
    path = [(r, i := len(moments[r]) - 1)]
    while (waited := waits[r][i]) or i:
        r, i = waited or (r, i - 1)
        path.append((r, i))
    return path[::-1]


def stash(programs: list[list[Action]], moments: Moments) -> list[list[tuple[Time, Time]]]:
    """Return per rank the (time, stages) at which the number of kept forward passes changes.

    A pass through one of v chunks counts 1/v, as in `Simulation.peak_stash`.
    """
    v = divided(sum(map(len, placement_of(programs))), len(programs))
    result: list[list[tuple[Time, Time]]] = []
    for program, row in zip(programs, moments, strict=True):
        kept: int = 0
        changes: list[tuple[Time, Time]] = [(0, 0)]
        for action, (start, end, _) in zip(program, row, strict=True):
            if isinstance(action, Forward | Backward | BackwardWeight):
                forward = isinstance(action, Forward)
                kept += 1 if forward else -1
                changes.append((start if forward else end, divided(kept, v)))
        result.append(changes)
    return result
