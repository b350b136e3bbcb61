"""The times of tasks on devices: equal to clocks that tick, and bounded by paths and by work."""

import itertools
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning.clock import TaskGraph


@st.composite
def task_graphs(draw):
    """Draw tasks of whole seconds on three devices; edges go from lower to higher numbers."""
    tasks = TaskGraph()
    for number in range(draw(st.integers(1, 10))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else ()
        device, seconds = draw(st.sampled_from("abc")), draw(st.integers(1, 4))
        tasks.add(f"task {number}", device, seconds, sorted(after))
    return tasks


def ticking(tasks):
    """Return when tasks end if every device, each second, goes on or takes what waits longest."""
    n, now = len(tasks.names), 0
    earlier = [[a for a in range(n) if b in tasks.following[a]] for b in range(n)]
    ends, running, ready = [None] * n, {}, {}
    while None in ends or running:
        for device, task in list(running.items()):
            if ends[task] == now:
                del running[device]
        for task in range(n):
            if all(ends[a] is not None and ends[a] <= now for a in earlier[task]):
                ready.setdefault(task, now)
        waiting = defaultdict(list)
        for task, since in ready.items():
            if ends[task] is None:
                waiting[tasks.devices[task]].append((since, task))
        for device, tasks_of_device in waiting.items():
            if device not in running:
                task = min(tasks_of_device)[1]
                running[device], ends[task] = task, now + tasks.seconds[task]
        now += 1
    return ends


@settings(max_examples=100)
@given(tasks=task_graphs())
def test_a_clock_that_ticks_says_the_same(tasks):
    got, want = [end for _, end in tasks.times()], ticking(tasks)
    for device in set(tasks.devices):
        own = [task for task in range(len(got)) if tasks.devices[task] == device]
        slices = sorted((got[task] - tasks.seconds[task], got[task]) for task in own)
        overlaps = [
            f"a device does two tasks at once: {a} and {b}"
            for a, b in itertools.pairwise(slices)
            if a[1] > b[0]
        ]
        assert not overlaps, overlaps[0]
    assert got == want
