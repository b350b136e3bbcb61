"""Measure checkpoints against np.save of the same bytes, and what a save costs the step.

Both bring their files to the disk (fsync), in one folder, and remove the one before the last two;
before a load the machine forgets what it has of them in memory. Which contestant is first changes
from round to round. What a save takes from a step is the time of a step in which it begins, less
the mean of a step before and one after; the ratio is over a save that nothing runs beside. Where
other programs use the cores, a second thread of ours gets its time from theirs and from our first
thread's; so a second row leaves out the time in which the first thread was ready and no core was
free.

A virtual machine may have to get memory from its host: 200 MB that it has not used for a while took
0.8 s, and 0.05 s when it had just used them. So before every measurement it uses that much memory.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, checkpoint, nn, optim
from minidist.checkpoint.parts import parts_of
from minidist.checkpoint.run_checkpoints import Background
from minidist.checkpoint.writing import sync
from minidist.comm import Group
from minidist.observe.bench.table import Rounds, Step, Times, middle

TITLE = "float32"
ARRAYS, ELEMENTS = 12, 1 << 22  # float32: 192 MiB
WIDTH, BATCH = 1024, 512  # of the step that a save runs beside
LIMIT, MOST_DELAY = 1.3, 0.05
WAYS = "what a save takes from its step", "the same, while a core is free"


def rows(rounds: int = 5) -> Iterator[dict]:
    """Yield the rows of a save, a load and a step that begins a save."""
    random = np.random.default_rng(0)
    state = {f"a{i}": random.standard_normal(ELEMENTS, np.float32) for i in range(ARRAYS)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        contest = Rounds(one_round(Path(folder), state, step) for step in range(3 + rounds))
    size = f"{sum(array.nbytes for array in state.values()) >> 20} MiB"
    for name in ("save", "load"):
        yield Rounds(contest[3:]).row(f"{name} {size}", name, "numpy", LIMIT)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, Cluster(1) as one:
        contest = Rounds(one.run(steps_and_saves, folder, rounds)[0])
    for name in WAYS:
        plain = middle(contest.seconds("plain", name))
        yield contest.row(name, name, "save", MOST_DELAY, note=f"a step takes {1e3 * plain:.0f} ms")


def one_round(folder: Path, state: dict[str, np.ndarray], step: int) -> dict[str, Times]:
    """Return {contestant: {work: seconds}}; each one's files are new."""
    ours, theirs, old = folder / "ours", folder / f"{step}.npy", folder / f"{step - 2}.npy"
    array = np.concatenate([*state.values()])
    calls: dict[tuple[str, str], Step] = {
        ("save", "ours"): partial(checkpoint.save, ours, state, step),
        ("save", "numpy"): partial(numpy_save, theirs, array, old),
        ("load", "ours"): partial(checkpoint.load, ours),
        ("load", "numpy"): partial(np.load, theirs),
    }
    seconds: dict[str, Times] = {"ours": {}, "numpy": {}}
    for work in ("save", "load"):
        for contestant in sorted(seconds, reverse=step % 2 == 1):
            forget(folder)
            np.ones(2 * array.nbytes, np.uint8)
            begin = time.perf_counter()
            calls[work, contestant]()
            seconds[contestant][work] = time.perf_counter() - begin
    return seconds


def numpy_save(path: Path, array: np.ndarray, old: Path) -> None:
    """Write one array of all numbers, and bring it to the disk; remove an old one."""
    with open(path, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    old.unlink(missing_ok=True)
    sync(path.parent)


def forget(folder: Path) -> None:
    """Let the next read of these files come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def steps_and_saves(group: Group, folder: str, rounds: int) -> list[dict[str, Times]]:
    """Return rounds: what a save takes from its step (ours), a step without one, a save."""
    random = np.random.default_rng(0)
    model = nn.MLP([WIDTH] * 5)
    x, y = random.standard_normal((BATCH, WIDTH), np.float32), random.integers(0, WIDTH, BATCH)
    optimizer, saver = optim.AdamW(model.parameters(), lr=1e-4), Background(group)
    numbers = itertools.count()

    def save() -> None:
        saver.save(folder, parts_of(model, optimizer), next(numbers), {})

    def step() -> None:
        nn.cross_entropy(model(x), y).backward()
        saver.wait_for_copy()
        optimizer.step()
        optimizer.zero_grad()

    def around_a_save() -> dict[str, Times]:
        before, beginning = seconds_here(step), seconds_here(save, step)
        saver.wait()
        plain = (before + seconds_here(step)) / 2
        alone = seconds_here(save, saver.wait)[0]
        taken = {"ours": beginning - plain, "plain": plain, "save": [alone, alone]}
        return {
            contestant: dict(zip(WAYS, map(float, two), strict=True))
            for contestant, two in taken.items()
        }

    with threadpool_limits(1):
        return [around_a_save() for _ in range(1 + rounds)][1:]


def seconds_here(*calls: Step) -> np.ndarray:
    """Return the seconds that calls take, and those without the time that no core was free."""
    begin, before = time.perf_counter(), queued()
    for call in calls:
        call()
    waited = queued() - before
    wall = time.perf_counter() - begin
    return np.array([wall, wall - waited])


def queued() -> float:
    """Return for how many seconds this thread has been ready and had no core; 0: not Linux."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
