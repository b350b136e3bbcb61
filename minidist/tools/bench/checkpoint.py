"""Measure checkpoints against np.save of the same bytes, and what a save costs the step.

Both bring their files to the disk (fsync), in one folder, and remove the one before the last two;
before a load the machine forgets what it has of them in memory. Which contestant is first changes
from round to round; a ratio is the median over rounds of the ratios within a round. What a step
loses is the time from its beginning to its end with a save that begins in it, less the mean of a
step before and one after, over the time of a save that nothing runs beside. Where other programs
use the cores, a second thread of ours gets its time from theirs and from our first thread's; so a
second row leaves out the time in which the first thread was ready and no core was free.

A virtual machine may have to get memory from its host: 200 MB that it has not used for a while took
0.8 s, and 0.05 s when it had just used them. So before every measurement it uses that much memory.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, checkpoint, nn, optim
from minidist.checkpoint.background import Background
from minidist.checkpoint.parts import parts_of
from minidist.checkpoint.writing import sync
from minidist.tools.bench.comm import HEAD, comparison, line

__all__ = ["HEAD", "line", "measure"]

ARRAYS, ELEMENTS = 12, 1 << 22  # float32: 192 MiB
WIDTH, BATCH = 1024, 512  # of the step that a save runs beside
LIMIT, MOST_DELAY = 1.3, 0.05


def measure(rounds: int = 5) -> Iterator[dict]:
    """Yield rows: name, ours_ms, peer, peer_ms, ratio, limit, note."""
    random = np.random.default_rng(0)
    state = {f"a{i}": random.standard_normal(ELEMENTS, np.float32) for i in range(ARRAYS)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = [one_round(Path(folder), state, step) for step in range(3 + rounds)][3:]
    size = f"{sum(array.nbytes for array in state.values()) >> 20} MiB"
    for name in ("save", "load"):
        yield comparison(f"{name} {size}", found, name, "numpy", LIMIT)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, Cluster(1) as one:
        yield from delay_rows(one.run(steps_and_saves, folder, rounds)[0])


def one_round(folder: Path, state: dict[str, np.ndarray], step: int) -> dict:
    """Return {contestant: {what: seconds}}; each one's files are new."""
    ours, theirs, old = folder / "ours", folder / f"{step}.npy", folder / f"{step - 2}.npy"
    array = np.concatenate([*state.values()])
    calls = {
        ("ours", "save"): lambda: checkpoint.save(ours, state, step),
        ("numpy", "save"): lambda: numpy_save(theirs, array, old),
        ("ours", "load"): lambda: checkpoint.load(ours),
        ("numpy", "load"): lambda: np.load(theirs),
    }
    found = {"ours": {}, "numpy": {}}
    for what in ("save", "load"):
        for who in sorted(found, reverse=step % 2):
            forget(folder)
            np.ones(2 * array.nbytes, np.uint8)
            found[who][what] = seconds(calls[who, what])
    return found


def seconds(call: Callable) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


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


def steps_and_saves(group, folder: str, rounds: int) -> np.ndarray:
    """Return [rounds, 3, 2]: a step, a step that begins a save, a save; see seconds_here."""
    random = np.random.default_rng(0)
    model = nn.MLP([WIDTH] * 5)
    x, y = random.standard_normal((BATCH, WIDTH), np.float32), random.integers(0, WIDTH, BATCH)
    optimizer, saver = optim.AdamW(model.parameters(), lr=1e-4), Background(group)
    numbers = iter(range(10**9))

    def step(save: bool = False):
        if save:
            saver.save(folder, parts_of(model, optimizer), next(numbers), {})
        nn.cross_entropy(model(x), y).backward()
        saver.wait_for_copy()
        optimizer.step()
        optimizer.zero_grad()

    def alone():
        saver.save(folder, parts_of(model, optimizer), next(numbers), {})
        saver.wait()

    found = []
    with threadpool_limits(1):
        for _ in range(1 + rounds):
            before, beginning = seconds_here(step), seconds_here(lambda: step(save=True))
            saver.wait()
            found.append(((before + seconds_here(step)) / 2, beginning, seconds_here(alone)))
    return np.array(found[1:])


def seconds_here(call: Callable) -> np.ndarray:
    """Return the seconds that a call takes, and those without the time that no core was free."""
    begin, before = time.perf_counter(), queued()
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


def delay_rows(found: np.ndarray) -> Iterator[dict]:
    """Yield the rows of what a save takes from the step that begins it."""
    names = ["what a save takes from its step", "the same, while a core is free"]
    for i, name in enumerate(names):
        delays = found[:, 1, i] - found[:, 0, i]
        plain, delay, save = (1e3 * np.median(x) for x in (found[:, 0, i], delays, found[:, 2, 0]))
        note = f"of a save of {save:.0f} ms; a step takes {plain:.0f} ms"
        row = {"name": name, "ours_ms": delay, "peer": "save", "peer_ms": save}
        ratio = float(np.median(delays / found[:, 2, 0]))
        yield row | {"ratio": ratio, "limit": MOST_DELAY, "note": note}
