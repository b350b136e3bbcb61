"""Ranks die: no run is lost, and the numbers are those of the same meshes."""

import os
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from minidist import checkpoint
from minidist.checkpoint import Keep, RunCheckpoints
from minidist.comm import run
from minidist.errors import RankDied
from minidist.nn.datasets import Text
from minidist.training import elastic
from minidist.training.elastic import in_words, train_elastic, with_fewer
from minidist.training.loop import train
from minidist.training.settings import Settings
from tests.strategies import assert_same_bits

TEXT = Text(np.random.default_rng(0).integers(0, 5, 2000), "abcde", "five characters")
SETTINGS = Settings(steps=60, batch=8, context=8, width=16, dropout=0.1, micro_batches=2)


@pytest.mark.parametrize(
    "mesh, ranks, fewer",
    [
        ({"dp": 4}, 3, "dp=3"),
        ({"pp": 4, "depth": 4}, 3, "dp=1, pp=3"),
        ({"dp": 2, "pp": 2, "tp": 2}, 7, "dp=1, pp=2, tp=2"),
        ({"dp": 4, "ep": 4, "experts": 4}, 3, "dp=3, ep=3"),
        ({"tp": 4, "heads": 12, "width": 24, "model": "llama", "kv_heads": 4}, 3, "dp=1, tp=2"),
    ],
    ids=str,
)
def test_the_largest_mesh_that_fits_cuts_the_model_as_before(mesh, ranks, fewer):
    assert in_words(with_fewer(replace(SETTINGS, **mesh), ranks)) == fewer


def train_and_die(group, data, settings, keep, log, step, rank):
    """Train; once in a run a rank is killed after this step."""
    killed, original = Path(keep.folder).with_name("one is killed"), RunCheckpoints.after

    def after(self, done, steps):
        original(self, done, steps)
        if (done, group.rank) == (step, rank) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoints, "after", after)
        return train(group, data, settings, keep, log)


def survive(folder, changes, step, rank):
    """Train while a rank dies; compare with the same meshes, which nobody leaves."""
    settings, keep = replace(SETTINGS, **changes), Keep(str(folder / "killed"), every=3)
    said, done = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "train", partial(train_and_die, step=step, rank=rank))
        losses, state, last = train_elastic(TEXT, settings, keep, said.append)
    keep = replace(keep, folder=str(folder / "calm"))
    for words in said:
        began = int(re.search(r"goes on after step (\d+) with", words)[1])
        if began > done:
            calm(settings, keep, stop_at=began)
        done = began
        settings, keep = with_fewer(settings, settings.ranks - 1), replace(keep, resume=began > 0)
    want = calm(settings, keep)
    assert settings == last and len(losses) == settings.steps and len(said) == 1
    assert losses == want[0], said
    assert_same_bits(state, want[1])


class Stopped(Exception):
    """A run that has saved what a test asks for."""


def calm(settings, keep, stop_at=None, log=None):
    """Train on threads until it is done, or until a checkpoint has been saved."""

    def worker(group):
        try:
            return train(group, TEXT, settings, keep, log)
        except Stopped:
            return None

    def after(self, done, steps):
        original(self, done, steps)
        if done == stop_at:
            self.end()
            raise Stopped

    original = RunCheckpoints.after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoints, "after", after)
        return run(worker, settings.ranks, transport="thread")[0]


MESHES = [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"cp": 3}, {"dp": 2, "precision": "float16"}]


@pytest.mark.parametrize(
    "changes, step",
    [
        ({"dp": 3}, 7),
        *(
            pytest.param(mesh, step, marks=pytest.mark.slow)
            for mesh, step in product(MESHES, (1, 3, 6, 11))
        ),
    ],
    ids=str,
)
def test_a_run_whose_rank_dies_is_not_lost(tmp_path, changes, step):
    survive(tmp_path, {"steps": 12, **changes}, step, rank=1)


class Dies:
    """In place of `run`: it trains on threads; each life ends at a step, and leaves something."""

    def __init__(self, folder, lives):
        self.folder, self.lives = folder, list(lives)

    def __call__(self, worker, ranks, data, settings, keep, log):
        stop_at, leaves = self.lives.pop(0) if self.lives else (None, None)
        if stop_at is None:
            return run(worker, ranks, data, settings, keep, log, transport="thread")
        calm(settings, keep, stop_at, log)
        leaves(self.folder)
        raise RankDied("rank 1 died", 1, -9)


def begun(folder):
    """Leave what a rank leaves that dies while the checkpoint of step 9 is written."""
    (folder / "step-00000009").mkdir()
    for name in ("rank-000.safetensors", "rank-001.safetensors.tmp"):
        (folder / "step-00000009" / name).write_bytes(b"half of it")


def damaged(folder):
    with open(folder / "step-00000006" / "rank-000.safetensors", "r+b") as file:
        file.truncate(300)


def test_what_a_death_leaves_of_a_newer_checkpoint_is_replaced(tmp_path, monkeypatch):
    settings, keep, said = replace(SETTINGS, dp=2, steps=12), Keep(str(tmp_path), every=3), []
    monkeypatch.setattr(elastic, "run", Dies(tmp_path, [(6, begun)]))
    losses, _, last = train_elastic(TEXT, settings, keep, said.append)
    assert len(losses) == 12 and last.ranks == 1
    assert said == ["rank 1 died; goes on after step 6 with dp=1"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000009", "step-00000012"}


def of_another_run(folder):
    checkpoint.save(folder / "other", {"a": np.ones(3)}, 9)
    (folder / "other" / "step-00000009").rename(folder / "step-00000009")


@pytest.mark.parametrize(
    "change, message",
    [
        (damaged, r"is truncated.* step 3 is whole: go on .* --resume-from 3"),
        (of_another_run, r"step-00000009 is of another run; use another folder"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_anothers_ends_the_run_before_it_says_that_it_goes_on(
    tmp_path, monkeypatch, change, message
):
    settings, keep, said = replace(SETTINGS, dp=2, steps=12), Keep(str(tmp_path), every=3), []
    monkeypatch.setattr(elastic, "run", Dies(tmp_path, [(6, change)]))
    with pytest.raises(ValueError, match=message):
        train_elastic(TEXT, settings, keep, said.append)
    assert not said


def test_the_death_of_the_last_rank_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(elastic, "train", partial(train_and_die, step=1, rank=0))
    with pytest.raises(RankDied, match="rank 0 died"):
        train_elastic(TEXT, SETTINGS, Keep(str(tmp_path / "saved"), every=10**6))
