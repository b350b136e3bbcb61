"""Ranks die at random moments: no run is lost, and the numbers are those of the same meshes."""

import os
import random
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
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
        ({"dp": 2, "tp": 2}, 3, "dp=1, tp=2"),
        ({"pp": 4, "depth": 4}, 3, "dp=1, pp=3"),
        ({"tp": 4}, 3, "dp=1, tp=2"),
        ({"dp": 2, "pp": 2, "tp": 2}, 7, "dp=1, pp=2, tp=2"),
        ({"dp": 4, "ep": 4, "experts": 4}, 3, "dp=3, ep=3"),
        ({"cp": 3}, 1, "dp=1"),
        ({"tp": 4, "heads": 12, "width": 24, "model": "llama", "kv_heads": 4}, 3, "dp=1, tp=2"),
    ],
    ids=str,
)
def test_the_largest_mesh_that_fits_cuts_the_model_as_before(mesh, ranks, fewer):
    assert in_words(with_fewer(replace(SETTINGS, **mesh), ranks)) == fewer


def ranks_of_this_process():
    """Return the processes of ranks: the children of the fork server, which is a child of this."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(entry)] = int(parent)
    return [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]


def kill_some(stop, seed, most, folder, before):
    """Kill a rank at a random moment, `most` times at most, once there is a first checkpoint."""
    draw, begun = random.Random(seed), False
    for _ in range(most):
        deadline, ranks = time.monotonic() + draw.uniform(0.0, 0.6), []
        while not stop.is_set() and (time.monotonic() < deadline or not ranks):
            time.sleep(0.002)
            # Not rglob: it looks into folders, and an old checkpoint's may have just been removed.
            begun = begun or any(folder.glob("step-*/manifest.json"))
            ranks = [pid for pid in ranks_of_this_process() if pid not in before] if begun else []
        if stop.is_set():
            return
        with suppress(ProcessLookupError):  # the run has ended meanwhile
            os.kill(draw.choice(ranks), signal.SIGKILL)
            one_is_killed(folder).touch()
        time.sleep(0.3)


def one_is_killed(folder):
    """Return the file that says that a rank has been killed, in a run that saves in this folder."""
    return Path(folder).with_name("one is killed")


def train_until_one_is_killed(group, data, settings, keep, log):
    """Train, and do not end before a rank has been killed: however late the killer is."""

    def after(self, done, steps):
        original(self, done, steps)
        while done == steps and not one_is_killed(keep.folder).exists():
            time.sleep(0.005)

    original = RunCheckpoints.after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoints, "after", after)
        return train(group, data, settings, keep, log)


def survive(folder, changes, seed, most=2):
    """Train while ranks die; compare with the same meshes, which nobody leaves."""
    settings, keep = replace(SETTINGS, **changes), Keep(str(folder / "killed"), every=3)
    said, stop, before = [], threading.Event(), ranks_of_this_process()
    killer = threading.Thread(target=kill_some, args=(stop, seed, most, folder / "killed", before))
    killer.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "train", train_until_one_is_killed)
            losses, state, last = train_elastic(TEXT, settings, keep, said.append)
    finally:
        stop.set()
        killer.join()
    keep, done = replace(keep, folder=str(folder / "calm")), 0
    for words in said:
        began = int(re.search(r"goes on after step (\d+) with", words)[1])
        if began > done:
            calm(settings, keep, stop_at=began)
        done = began
        settings, keep = with_fewer(settings, settings.ranks - 1), replace(keep, resume=began > 0)
    want = calm(settings, keep)
    assert settings == last and len(losses) == settings.steps
    assert losses == want[0], said
    assert_same_bits(state, want[1])
    return len(said)


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


SHORT = {"dp": 3, "steps": 25}  # the seed lets a rank die 7 ms after the first checkpoint


@pytest.mark.parametrize(
    "changes",
    [SHORT, pytest.param(SHORT | {"precision": "float16"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_run_whose_rank_dies_is_not_lost(tmp_path, changes):
    assert survive(tmp_path, changes, seed=31, most=1) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"cp": 3}])
def test_twenty_kills(tmp_path, mesh):
    kills = seed = 0
    while kills < 5:
        seed += 1
        kills += survive(tmp_path / f"{seed}", mesh, seed)


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


def test_only_the_first_life_goes_on_from_the_step_that_is_asked_for(tmp_path, monkeypatch):
    settings, keep, said = replace(SETTINGS, dp=2, steps=15), Keep(str(tmp_path), every=3), []
    calm(settings, keep, stop_at=9)
    monkeypatch.setattr(elastic, "run", Dies(tmp_path, [(12, lambda folder: None)]))
    log, keep = tmp_path / "log.csv", replace(keep, resume=True, step=6)
    train_elastic(TEXT, settings, keep, said.append, log)
    assert said == ["rank 1 died; goes on after step 12 with dp=1"]
    rows = [row.split(",")[0] for row in log.read_text().splitlines()]
    assert rows == ["step", *map(str, range(7, 16))]  # of both lives, each step once
    log.unlink()
    kept = {"aside-step-00000009", "step-00000012", "step-00000015"}
    assert {path.name for path in tmp_path.iterdir()} == kept


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


def test_the_death_of_the_last_rank_ends_the_run(tmp_path):
    stop, before = threading.Event(), ranks_of_this_process()
    saved, keep = tmp_path / "saved", Keep(str(tmp_path / "never"), every=10**6)
    (saved / "step-0").mkdir(parents=True)
    (saved / "step-0" / "manifest.json").touch()  # the killer need not wait for a checkpoint
    killer = threading.Thread(target=kill_some, args=(stop, 0, 1, saved, before))
    killer.start()
    try:
        with pytest.raises(RankDied, match="rank 0 died"):
            train_elastic(TEXT, replace(SETTINGS, steps=10**6), keep)
    finally:
        stop.set()
        killer.join()
