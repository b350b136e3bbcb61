"""`minidist train --checkpoint`: a run that went on is the run that was never interrupted."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from minidist import checkpoint
from minidist.checkpoint import Keep
from minidist.cli import main
from minidist.errors import RankFailed
from minidist.nn.datasets import Text
from minidist.training.kinds import model_of
from minidist.training.loop import train
from minidist.training.settings import Settings
from minidist.verify.compare import compare
from tests.strategies import assert_same_bits

TEXT = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")
SMALL = Settings(steps=5, batch=6, context=8, width=12, dropout=0.2, micro_batches=2)
MESHES = [
    {},
    {"tp": 2, "tied": True},
    {"cp": 2},
    {"dp": 2, "ep": 2, "experts": 3, "zero": 1},
    {"dp": 2, "pp": 2, "schedule": "zb_v"},
]


@pytest.fixture
def interrupted(cluster, tmp_path, monkeypatch):
    return partial(interrupt, cluster, tmp_path, monkeypatch)


def interrupt(cluster, folder, monkeypatch, first, second=None, data=TEXT, at=3, device="cpu"):
    """Train `at` steps under one mesh, the others under the second; return its losses, state.

    The first run is told of all steps, and dies when it has saved.
    """
    keep = Keep(str(folder), every=at)

    def worker(group):
        try:
            train(group, data, first, keep)
        except Exception as error:
            if "died" not in str(error):
                raise

    def dies(self, done, steps):
        original(self, done, steps)
        if done == at:
            self.end()
            raise ValueError("died")

    original = checkpoint.RunCheckpoints.after
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.RunCheckpoints, "after", dies)
        cluster(first.ranks, "thread", device).run(worker)
    second, keep = second or first, replace(keep, resume=True)
    return cluster(second.ranks, "thread", device).run(train, data, second, keep)[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_run_that_goes_on_on_its_mesh_is_the_uninterrupted_run_bit_for_bit(
    cluster, interrupted, mesh
):
    settings = replace(SMALL, **mesh)
    want = cluster(settings.ranks, "thread").run(train, TEXT, settings)[0]
    losses, state = interrupted(settings)
    assert losses == want[0]
    assert_same_bits(state, want[1])


@pytest.mark.parametrize("a, b", [({"dp": 2}, {"pp": 2}), ({"tp": 2, "zero": 1}, {"cp": 3})])
def test_a_run_that_goes_on_on_another_mesh_is_within_the_bound(
    cluster, interrupted, monkeypatch, a, b
):
    monkeypatch.setattr(
        "minidist.training.loop.model_of", lambda *of: model_of(*of).astype("float64")
    )
    want = cluster(1, "thread").run(train, TEXT, SMALL)[0]
    losses, state = interrupted(replace(SMALL, **a), replace(SMALL, **b))
    np.testing.assert_allclose(losses, want[0], rtol=1e-9)
    assert (comparison := compare([state], want[1])).ok, comparison


@pytest.mark.parametrize(
    "settings, text, message",
    [
        ({"width": 16}, TEXT, "is of a run with width = 12, not 16; give it the same"),
        ({"seed": 1}, TEXT, "with seed = 0, not 1"),
        ({"batch": 4}, TEXT, "with batch = 6, not 4"),
        ({"depth": 1}, TEXT, "a model of fewer blocks is another model"),
        ({}, Text(TEXT.tokens, "abcdf", "others"), "the character 'e' of five characters is none"),
    ],
)
def test_a_run_that_was_told_something_else_does_not_go_on(
    cluster, tmp_path, settings, text, message
):
    cluster(1, "thread").run(train, TEXT, SMALL, Keep(str(tmp_path)))
    keep = Keep(str(tmp_path), resume=True)
    with pytest.raises(RankFailed, match=message):
        cluster(1, "thread").run(train, text, replace(SMALL, **settings), keep)


TINY = "train --transport thread --ranks 2 --batch 8 --context 8 --width 8 --heads 2 --depth 1"


def command(capsys, *more, status=0):
    assert main([*TINY.split(), "--sample", "0", *map(str, more)]) == status
    return capsys.readouterr()


def test_the_command_saves_and_goes_on(tmp_path, capsys):
    (tmp_path / "text").write_text("the cat sat on the mat. " * 40)
    more = ["--text", tmp_path / "text", "--checkpoint", tmp_path / "kept", "--every", 2]
    command(capsys, *more, "--steps", 4)
    assert [p.name for p in sorted((tmp_path / "kept").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    out = command(capsys, *more, "--steps", 5, "--resume", "--ranks", 1).out
    rates = "--steps 5, not 4: the learning rate goes on with 7.0e-04, after 9.8e-04"
    assert re.search(rf"goes on after step 4, from .*step-00000004; {rates}\n", out)
    assert "1 step in" in out and "certificate: ok" in out
    again = command(capsys, *more, "--steps", 5, "--resume").out
    assert "step-00000005; no update is left of --steps 5\n" in again
    assert re.search("loss .* -> .*", again)[0] == re.search("loss .* -> .*", out)[0]


@pytest.mark.parametrize("commit", ["81d6444", "b7fbc09", "b1499cf", "81b6eb4"])
def test_a_run_that_an_older_minidist_has_saved_goes_on(tmp_path, monkeypatch, capsys, commit):
    """former/ has what these commits saved after step 2 of 4: of another version, add one."""
    sizes = "--batch 4 --context 4 --width 4 --heads 1 --depth 1 --ranks 1 --steps 4"
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 12)
    more = [*sizes.split(), "--text", "text.txt"]
    shutil.unpack_archive(Path(__file__).parent / "former" / f"{commit}.zip", "kept")
    out = command(capsys, *more, "--checkpoint", "kept", "--resume").out
    want = command(capsys, *more).out
    assert "goes on after step 2" in out and "2 steps in" in out
    assert re.search("loss .* -> .*", out)[0] == re.search("loss .* -> .*", want)[0]
    assert sorted(checkpoint.manifest.whole_ones(Path("kept"))) == [2, 4]


def test_a_run_goes_on_before_a_damaged_checkpoint_and_keeps_that_under_another_name(
    tmp_path, capsys
):
    (tmp_path / "text").write_text("the cat sat on the mat. " * 40)
    kept = tmp_path / "kept"
    more = ["--text", tmp_path / "text", "--checkpoint", kept, "--every", 2, "--steps"]
    want = command(capsys, *more, 6).out
    loss, bits = re.search("loss .* -> .*", want)[0], checkpoint.load(kept)[0]
    damage(kept / "step-00000006" / "rank-000.safetensors")
    said = command(capsys, *more, 8, "--resume", status=2)
    assert not said.out and said.err.count("\n") == 1
    assert (
        "checksum" in said.err and "step 4 is whole: go on from it with --resume-from 4" in said.err
    )
    said = command(capsys, *more, 6, "--resume-from", 4).out
    aside = kept / "aside-step-00000006"
    assert f"step 4, from {kept}/step-00000004; newer ones (6) are renamed to aside-*\n" in said
    assert re.search("loss .* -> .*", said)[0] == loss
    assert_same_bits(checkpoint.load(kept)[0], bits)
    assert {path.name for path in kept.iterdir()} == {aside.name, "step-00000004", "step-00000006"}
    assert (aside / "manifest.json").exists()
    again = command(capsys, *more, 7, "--resume").out
    assert "goes on after step 6" in again and "certificate: ok" in again


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--resume"], "--resume needs --checkpoint FOLDER"),
        (["--every", "5"], "--every needs --checkpoint FOLDER"),
        (["--resume-from", "3"], "--resume-from needs --checkpoint FOLDER"),
        (
            ["--resume-from", "3", "--checkpoint", "kept"],
            "kept has no checkpoint of step 3, but of",
        ),
        (["--resume-from", "1", "--checkpoint", "kept"], "is not from `minidist train`"),
        (["--checkpoint", ""], "'' is no folder; the one where you are is '.'"),
        (["--resume", "--checkpoint", ""], "'' is no folder; the one where you are is '.'"),
        (["--checkpoint", "", "--servers", "1"], "'' is no folder; the one where you are is '.'"),
        (["--resume", "--checkpoint", "nowhere"], "nowhere has no checkpoint; leave --resume out"),
        (["--checkpoint", "kept"], "kept has a checkpoint of step 1; go on from it with --resume"),
        (["--checkpoint", "file"], "cannot read the folder file: Not a directory"),
    ],
)
def test_the_command_refuses_before_it_trains(tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("kept", {"a": np.ones(3)}, 1)
    (tmp_path / "file").write_text("")
    said = command(capsys, *more, status=2)
    assert message in said.err and not said.out and said.err.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"pp": 2, "zero": 1}, {"precision": "float16"}])
def test_a_run_on_a_gpu_goes_on_bit_for_bit(cluster, tmp_path, monkeypatch, changes):
    settings = replace(SMALL, depth=1, **changes)
    want = cluster(settings.ranks, "thread", "gpu").run(train, TEXT, settings)[0]
    found = interrupt(cluster, tmp_path, monkeypatch, settings, device="gpu")
    assert found[0] == want[0]
    assert_same_bits(found[1], want[1])


@pytest.mark.gpu
def test_what_a_gpu_has_saved_is_loaded_on_the_host_and_there_again(cluster, tmp_path):
    settings = replace(SMALL, depth=1, steps=2)
    keep, states = Keep(str(tmp_path)), []
    for device, steps in ("gpu", 2), ("cpu", 2), ("gpu", 3):
        told = replace(settings, steps=steps)
        states.append(cluster(1, "thread", device).run(train, TEXT, told, keep)[0][1])
        keep = replace(keep, resume=True)
    assert_same_bits(states[1], states[0])
    assert checkpoint.load(tmp_path)[1] == 3
