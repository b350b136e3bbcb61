"""Nothing is lost: neither by a load, nor by a crash at any moment of a save."""

import os

import numpy as np
import pytest

from minidist import Mesh, checkpoint, nn, optim
from minidist.checkpoint import Part, Saved, parts_of, restore
from minidist.checkpoint.parts import about
from minidist.hybrid import Hybrid
from tests.checkpoint.causes import of_load
from tests.strategies import assert_same_bits

MESHES = [{"tp": 2}, {"dp": 2, "zero": 1}, {"pp": 2}]


def save_and_load(cluster, folder, mesh):
    """One device -> the mesh -> the mesh again; return what the ranks hold, what was saved."""
    model = nn.Transformer(7, 8, 2, 2, 4, 3, "float64")
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    random = np.random.default_rng(0)
    optimizer.steps = 9
    optimizer.state = [[random.random(len(s.data)) for _ in range(2)] for s in optimizer.slices]
    parts = parts_of(model, optimizer)
    checkpoint.save(folder / "one", parts, 9, about={"optimizer": about(optimizer)})

    def worker(group, source, target):
        axes = {"dp": 1, "pp": 1, "tp": 1} | {k: n for k, n in mesh.items() if k != "zero"}
        zero = mesh.get("zero", 0)
        hybrid = Hybrid(nn.Transformer(7, 8, 2, 2, 4, 1, "float64"), Mesh(group, **axes), zero=zero)
        mine = optim.AdamW(hybrid.parameters(), lr=0.1)
        restore(Saved.newest(source), hybrid, mine)
        held = parts_of(hybrid, mine)
        checkpoint.save(target, held, 9, group, {"optimizer": about(mine)})
        return [Part(part.cut, part.on_host()) for part in held], mine.steps

    run = cluster(2, "thread").run
    run(worker, folder / "one", folder / "two")
    ranks = run(worker, folder / "two", folder / "three")
    return ranks, {part.cut.name: part.on_host() for part in parts}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_load_loses_nothing(cluster, tmp_path, mesh):
    ranks, whole = save_and_load(cluster, tmp_path, mesh)
    if cause := of_load(ranks, whole, 9):
        pytest.fail(cause)


class PowerFailure(BaseException):
    """What no program can handle."""


def crash_at(count, monkeypatch, save):
    """Let the power fail before the count-th change of the disk; return whether it did."""
    left = [count]

    def failing(change):
        def call(*arguments, **options):
            if not left[0]:
                raise PowerFailure
            left[0] -= 1
            return change(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "rmdir", "mkdir", "fsync"):
            patch.setattr(os, name, failing(getattr(os, name)))
        try:
            save()
        except PowerFailure:
            return True
    return False


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    crashes, newest = 0, []
    while True:
        folder = tmp_path / f"{crashes}"
        for step in (1, 2):
            checkpoint.save(folder, {"a": np.full(3, step)}, step)

        def save(folder=folder):
            checkpoint.save(folder, {"a": np.full(3, 3)}, 3)

        crashed = crash_at(crashes, monkeypatch, save)
        try:
            found, step = checkpoint.load(folder)
        except ValueError as error:
            pytest.fail(
                f"a crash left a checkpoint that counts: {error}; the manifest was there first"
            )
        assert_same_bits(found, {"a": np.full(3, step)})
        newest.append(step)
        checkpoint.save(folder, {"a": np.full(3, 4)}, 4)  # and the next run saves
        assert checkpoint.load(folder)[1] == 4
        assert len(list(folder.iterdir())) == 2
        if not crashed:
            break
        crashes += 1
    assert crashes > 8 and newest == sorted(newest) and {2, 3} == set(newest)
