"""Failures: checkpoints that a crash leaves whole, resharding, a sampler's state, fewer ranks.

Checkpoints are in real folders. A rank may stop, or the power fail, before each change there: of a
name, or an fsync.
"""

import os
import shutil
from collections import Counter
from functools import partial
from itertools import count, islice, pairwise
from math import prod
from pathlib import Path
from stat import S_ISDIR
from tempfile import TemporaryDirectory
from threading import current_thread
from unittest.mock import patch

import numpy as np
import pytest

from minidist import checkpoint, nn, run
from minidist.checkpoint import manifest
from minidist.course.answers import check
from minidist.course.inside import inside, task
from minidist.course.labs.ranks import refused
from minidist.nn.datasets import Sampler
from minidist.nn.datasets import batch as dealing
from minidist.nn.shard import pieces
from minidist.training.elastic import go_on, with_fewer
from minidist.training.settings import Settings

OTHERS = "step-00000001/notes.txt"
CHANGES = "mkdir", "replace", "rename", "unlink", "remove", "rmdir", "fsync"


def state(file):
    """Return what an fsync brings to the disk: a folder's names, a file's content as of now."""
    found = os.stat(file)
    return os.listdir(file) if S_ISDIR(found.st_mode) else (found.st_size, found.st_mtime_ns)


def shown(change, target):
    if change == "fsync":
        return "the fsync of a folder" if isinstance(state(target), list) else "the fsync of a file"
    return f"the {change} of {Path(target).name}"


class Disk:
    """A folder in which one thread stops before a change; `left` changes come first.

    synced   {inode: the state that is surely on the disk}
    stopped  the change that was not made, "" if there was none
    """

    def __init__(self, folder, thread, left):
        self.folder, self.thread, self.left, self.stopped = folder, thread, left, ""
        self.synced = {path.stat().st_ino: state(path) for path in [folder, *folder.rglob("*")]}

    def watched(self):
        return patch.multiple(os, **{name: self.counted(name) for name in CHANGES})

    def counted(self, name):
        change = getattr(os, name)

        def call(*arguments, **options):
            if current_thread().name == self.thread:
                if not self.left:
                    self.stopped = self.stopped or shown(name, arguments[0])
                    raise RuntimeError("this rank has stopped")
                self.left -= 1
            if name != "fsync":
                return change(*arguments, **options)
            self.synced[os.stat(arguments[0]).st_ino] = state(arguments[0])

        return call

    def lose(self, names):
        """Empty the files that were not synced; if `names`, remove what has an unsynced name."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if names and path.name not in self.synced.get(path.parent.stat().st_ino, ()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_file() and self.synced.get(path.stat().st_ino) != state(path):
                path.write_bytes(b"")


def save_on(group, folder, arrays, step):
    checkpoint.save(folder, {name: a + step for name, a in arrays.items()}, step, group)


def save(N, *what):
    return save_on(None, *what) if N == 1 else run(save_on, N, *what, transport="thread")


def fault(folder, arrays, oldest):
    """Return what is wrong, or "": all that count are whole, one is of step `oldest` or later."""
    try:
        whole = manifest.whole_ones(folder)
        for step, path in whole.items():
            saved = checkpoint.Saved(path)
            for name, array in arrays.items():
                if name not in saved.shapes or (saved.whole(name) != array + step).any():
                    return f"{path.name} counts, but its {name} is missing or wrong"
    except ValueError as error:
        return str(error).replace(f"{folder.parent}/", "")
    return "" if max(whole, default=0) >= oldest else f"none of step {oldest} or later counts"


def crash(disk, N, arrays, power):
    """Save step 3 until a rank stops, the next step on one rank; return what is wrong, or ""."""
    with disk.watched():
        try:
            save(N, disk.folder, arrays, 3)
        except Exception:
            if not disk.stopped:
                raise
    for names in (False, True) if power else (None,):
        if power:
            disk.lose(names)
        if wrong := fault(disk.folder, arrays, 2 if disk.stopped else 3):
            return wrong
    step = max(manifest.whole_ones(disk.folder)) + 1
    try:
        save(1, disk.folder, arrays, step)
    except ValueError as error:
        return f"the next run fails: {error}".replace(f"{disk.folder.parent}/", "")
    return fault(disk.folder, arrays, step) or left(disk.folder, step)


def left(folder, step):
    """Return what else is there than the last two checkpoints and another's file; or ""."""
    if not (folder / OTHERS).exists():
        return f"{OTHERS}, which another has written, is removed"
    files = [path for path in folder.rglob("*.*") if path.suffix in (".tmp", ".json")]
    names = {f"{path.parent.name}/{path.name}" for path in files}
    odd = names - {f"{manifest.folder_of(n)}/{manifest.NAME}" for n in (step - 1, step)}
    return f"{min(odd)} is left" if odd else ""


@inside
def crashes(N, arrays, power):
    """Save on N ranks, with a stop before each change of each rank; return the first fault."""
    with TemporaryDirectory() as temporary:
        before, after = Path(temporary, "before"), Path(temporary, "after")
        for step in (1, 2):
            save(N, before, arrays, step)
        (before / OTHERS).touch()
        for rank in range(N):
            for at in count():
                shutil.copytree(before, after)
                disk = Disk(after, current_thread().name if N == 1 else f"rank {rank}", at)
                if wrong := crash(disk, N, arrays, power):
                    when = f"rank {rank} stops before its change {at + 1}, {disk.stopped}"
                    return {"the fault": f"{when if disk.stopped else 'no rank stops'}: {wrong}"}
                whole = checkpoint.Saved.newest(after).whole
                newest = {f"the newest {name}": whole(name) for name in arrays}
                shutil.rmtree(after)
                if not disk.stopped:
                    break
    return {"the fault": "none"} | newest


def cut_of(shape, axis, indices, start, stop):
    shard = None if axis is None else nn.Shard(axis, np.array(indices, int), shape[axis])
    return nn.Slice("a", tuple(shape), shard, start, stop)


@inside
def reshard(shape, saved, wanted):
    """Return what ranks that want slices put together, and how often each element is read."""
    whole, cuts = np.arange(1, 1 + prod(shape)).reshape(shape), [cut_of(shape, *s) for s in saved]
    found = {}
    for m, cut in enumerate(cut_of(shape, *w) for w in wanted):
        elements, times, read = np.zeros(len(cut), int), Counter(), pieces(cut, cuts)
        for piece in read:
            elements[piece.places] = cuts[piece.number].of(whole)[piece.taken]
            times.update(np.asarray(piece.places).tolist())
        found |= {
            f"the elements on rank {m}": elements,
            f"the times that each is read on rank {m}": [times[i] for i in range(len(cut))],
            f"a piece is empty on rank {m}": any(len(piece.taken) == 0 for piece in read),
            f"a slice has two pieces on rank {m}": len({p.number for p in read}) < len(read),
        }
    return found


@inside
def dealt(method, done, examples, batch, size, batches, **more):
    """Return what ranks are dealt in the batches after what is done, and how many epochs drawn."""
    found, draw = {}, dealing.generator
    with patch.object(dealing, "generator", side_effect=draw) as drawn:
        for r in range(size):
            own = Sampler(examples, batch, rank=r, size=size, **more)
            shares = list(islice(getattr(own, method)(done), batches))
            found[f"the examples on rank {r}"] = np.concatenate([s.examples for s in shares])
            found[f"examples per batch on rank {r}"] = [len(s.examples) for s in shares]
    return found | {"epochs drawn": drawn.call_count}


def axes_of(settings):
    return [getattr(settings, axis) for axis in ("dp", "pp", "cp", "tp", "ep")]


@inside
def fewer(settings, ranks):
    """Return the next mesh: dp, pp, cp, tp, ep."""
    return {"the mesh": axes_of(with_fewer(Settings(**settings), ranks))}


def write(folder, step, kind):
    """Write a checkpoint: "whole", "begun": it has no manifest, or "damaged": it lacks a file."""
    path = Path(folder, manifest.folder_of(step))
    path.mkdir(exist_ok=True)
    found = {"format": manifest.FORMAT, "version": manifest.VERSION, "step": step, "about": {}}
    found |= {"arrays": {}, "files": {}}
    if kind == "damaged":
        held = manifest.describe(cut_of([1], None, None, 0, 1))
        found["arrays"] = {"a": {"shape": [1], "dtype": "int64"}}
        found["files"] = {"rank-000.safetensors": {"bytes": 8, "header": "", "holds": {"a": held}}}
    if kind != "begun":
        (path / manifest.NAME).write_bytes(manifest.encode(found))


@inside
def lives(settings, deaths):
    """Return how a run goes on after deaths: (dead ranks, steps done, {step: its checkpoint})."""
    found, now = {}, Settings(**settings)
    with TemporaryDirectory() as folder:
        keep = checkpoint.Keep(folder)
        for number, (dead, steps, kinds) in enumerate(deaths, 1):
            for step, kind in kinds.items():
                write(folder, step, kind)
            goes_on = not refused(go_on, now, keep, now.ranks - dead)
            found[f"it goes on after death {number}"] = goes_on
            if not goes_on:
                break
            now, keep, done = go_on(now, keep, now.ranks - dead)
            found |= {
                f"the mesh after death {number}": axes_of(now),
                f"done, and to be done again, after death {number}": [done, steps - done],
                f"it resumes after death {number}": keep.resume,
            }
    return found


@task("9.1")
@pytest.mark.parametrize(
    "group, N", [("a rank stops", 1), ("a rank stops", 3), ("the power fails", 1)]
)
def test_a_crash_leaves_a_whole_checkpoint(group, N, rng):
    sizes = rng.integers(1, 9, int(rng.integers(2, 5)))  # of two arrays, one rank writes none
    arrays = {f"w{i}": rng.standard_normal(size) for i, size in enumerate(sizes)}
    crashes.check(N, arrays, group == "the power fails")


# 9.2. A slice is (axis, indices along it, start, stop); without an axis, of the whole array.


def runs(rng, shape, N):
    """Cut all elements at random: a rank may have none."""
    ends = [0, *np.sort(rng.integers(0, prod(shape) + 1, N - 1)).tolist(), prod(shape)]
    return [(None, None, start, stop) for start, stop in pairwise(ends)]


def shards(shape, axis, N, rounds=1):
    """Deal the indices of an axis in rounds of N runs, as attention's columns; padding included."""
    width = -(-shape[axis] // (N * rounds))
    dealt = np.arange(N * rounds * width).reshape(rounds, N, width)
    size = prod(shape) // shape[axis] * rounds * width
    return [(axis, dealt[:, r].reshape(-1).tolist(), 0, size) for r in range(N)]


def halves(cuts):
    """Cut each slice into two runs, as ZeRO does with the parts of a split matrix."""
    found = [((a, i, 0, stop // 2), (a, i, stop // 2, stop)) for a, i, _, stop in cuts]
    return [cut for pair in found for cut in pair]


@task("9.2")
@pytest.mark.parametrize("N, M", [(2, 3), (5, 2), (3, 5)])
@pytest.mark.parametrize("group", ["runs of elements", "rows and columns", "copies and gaps"])
def test_ranks_read_each_element_once_from_any_cut(group, N, M, rng):
    shape = rng.integers(5, 9, 2).tolist()
    rows, columns = (partial(shards, shape, axis) for axis in (0, 1))
    flat = partial(runs, rng, shape)
    cases = {
        "runs of elements": [(flat(a), flat(b)) for a, b in ((N, M), (1, N), (N, 1), (4, 4))],
        "rows and columns": [
            (rows(N), columns(M)),
            (columns(N, 3), columns(M)),
            (halves(columns(N)), halves(rows(M, 2))),
            (columns(N), flat(M)),
        ],
        "copies and gaps": [
            (flat(N) + columns(M), rows(3)),
            (2 * rows(N), flat(M)),
            (halves(rows(N))[1:], flat(M)),
        ],
    }
    for saved, wanted in cases[group]:
        reshard.check(shape, saved, wanted)


@task("9.3")
@pytest.mark.parametrize("N, shuffle", [(1, True), (2, True), (3, True), (5, False)])
@pytest.mark.parametrize(
    "group, method", [("the same batches", "after"), ("other batches", "after_examples")]
)
def test_a_sampler_goes_on_where_it_was(group, method, N, shuffle, rng):
    batch = int(rng.integers(3, 8))
    examples = batch * int(rng.integers(2, 5)) + int(rng.integers(1, batch))  # one batch is short
    unit = examples if method == "after_examples" else -(-examples // batch)
    done = unit * int(rng.integers(2, 30)) + int(rng.integers(1, unit))
    asked = method, done, examples, batch, N, 2 * -(-examples // batch) + 1
    more = {"seed": int(rng.integers(99)), "micro_batches": int(rng.integers(1, 4))}
    more |= {"shuffle": shuffle}
    check(dealt(*asked, **more), dealt.package(*asked, **more), at_most=("epochs drawn",))


MESHES = [
    {"dp": 5},
    {"dp": 2, "pp": 2, "tp": 2},
    {"tp": 4, "dp": 2},
    {"pp": 3, "cp": 2, "depth": 3},
    {"dp": 4, "ep": 4, "experts": 4},
    {"dp": 6, "tp": 2, "batch": 12, "micro_batches": 2},
]


@task("9.4")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_fewer_ranks_make_the_largest_mesh_that_fits(mesh):
    size = prod(mesh.get(axis, 1) for axis in ("dp", "pp", "cp", "tp"))
    for ranks in {1, size // 2, size - 1}:
        fewer.check({"batch": 24, "micro_batches": 3} | mesh, ranks)


@task("9.4")
@pytest.mark.parametrize(
    "kinds", ["", "whole", "damaged", "damaged whole", "whole begun", "whole damaged"]
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(kinds, rng):
    first, *more = rng.integers(3, 9, 3).tolist()
    steps = np.cumsum([first + 1, *more]).tolist()  # done before each death
    there = {first - 1 + i: kind for i, kind in enumerate(kinds.split())}
    deaths = [(2, steps[0], there), (1, steps[1], {}), (1, steps[2], {steps[1] - 1: "whole"})]
    lives.check({"dp": 4, "tp": 2, "batch": 24}, deaths)
