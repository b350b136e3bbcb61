"""The times of tasks on devices: equal to clocks that tick, and bounded by paths and by work."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning.clock import TaskGraph
from tests.planted import planted


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


def check(tasks):
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


@settings(max_examples=100)
@given(tasks=task_graphs())
def test_a_clock_that_ticks_says_the_same(tasks):
    check(tasks)


def test_a_device_that_does_two_tasks_at_once_is_named():
    tasks = TaskGraph()
    tasks.add("a", "rank", 2)
    tasks.add("b", "rank", 2)
    with planted("links_without_queues"), pytest.raises(AssertionError, match="two tasks at once"):
        check(tasks)


@given(tasks=task_graphs())
def test_no_replay_is_shorter_than_its_longest_path_or_its_busiest_device(tasks):
    n, ends = len(tasks.names), [end for _, end in tasks.times()]
    paths, work = list(tasks.seconds), defaultdict(int)
    for task in range(n):
        work[tasks.devices[task]] += tasks.seconds[task]
        for other in tasks.following[task]:
            paths[other] = max(paths[other], paths[task] + tasks.seconds[other])
    assert all(end >= path for end, path in zip(ends, paths, strict=True))
    assert max(max(paths), max(work.values())) <= max(ends) <= sum(tasks.seconds)
    assert [end for _, end in tasks.times()] == ends


def test_the_picture_of_the_file():
    tasks = TaskGraph()
    a = tasks.add("A", 0, 2)
    b = tasks.add("B", 1, 1)
    m = tasks.add("m", "link", 3, [b])
    tasks.add("C", 0, 1, [m, a])
    assert tasks.times() == [(0, 2), (0, 1), (1, 4), (4, 5)]
