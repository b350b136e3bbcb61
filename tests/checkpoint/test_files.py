"""The files of a checkpoint: what is read back, what counts, what is refused, what is left."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import checkpoint
from minidist.checkpoint import manifest, writing
from minidist.checkpoint.reading import Saved
from minidist.errors import RankFailed
from tests.strategies import arrays, assert_same_bits, seeds, shapes

pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")


def state(seed=0):
    return {"a.weight": arrays(4, 3, seed=seed, dtype="float32"), "b": arrays(5, seed=seed)}


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 3 and 7."""
    for step in (3, 7):
        checkpoint.save(tmp_path, state(step), step)
    return tmp_path


def files_in(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()
    }


@given(seeds, st.lists(shapes(), max_size=4), st.sampled_from(["f2", "f4", "f8", "i8", "u1", "?"]))
def test_arrays_come_back_bit_for_bit(tmp_path_factory, seed, wanted, dtype):
    folder = tmp_path_factory.mktemp("checkpoint")
    state = {f"p{i}": abs(9 * arrays(*s, seed=seed)).astype(dtype) for i, s in enumerate(wanted)}
    state["across"] = np.arange(12.0).reshape(3, 4).T  # not in one piece
    state["big-endian"] = np.arange(3, dtype=">f8")
    checkpoint.save(folder, state, 5)
    found, step = checkpoint.load(folder)
    state["big-endian"] = np.arange(3.0)
    assert_same_bits(found, state)
    assert step == 5


def test_the_files_are_those_of_the_safetensors_library(two):
    from safetensors.numpy import load_file

    assert_same_bits(load_file(two / "step-00000007" / "rank-000.safetensors"), state(7))


def test_the_last_two_are_kept_and_the_newest_is_loaded(two):
    checkpoint.save(two, state(12), 12)
    assert sorted(p.name for p in two.iterdir()) == ["step-00000007", "step-00000012"]
    assert_same_bits(checkpoint.load(two)[0], state(12))


def test_a_folder_without_a_manifest_does_not_count_and_is_replaced(two):
    left = two / "step-00000009"
    left.mkdir()
    (left / "rank-005.safetensors").write_bytes(b"half of it")
    (left / "rank-000.safetensors.tmp").write_bytes(b"a part")
    assert checkpoint.load(two)[1] == 7
    checkpoint.save(two, state(9), 9)
    assert sorted(p.name for p in left.iterdir()) == ["manifest.json", "rank-000.safetensors"]
    assert checkpoint.load(two)[1] == 9


def test_what_else_is_in_the_folder_stays(two):
    (two / "step-00000003" / "notes.txt").write_text("mine")
    (two / "step-by-step").mkdir()
    checkpoint.save(two, state(), 9)
    assert (two / "step-00000003" / "notes.txt").read_text() == "mine"
    assert (two / "step-by-step").is_dir() and not (two / "step-00000003/manifest.json").exists()


def test_a_step_that_is_there_is_not_overwritten(two):
    before = files_in(two)
    with pytest.raises(ValueError, match=r"step-00000007 is there already; resume"):
        checkpoint.save(two, state(1), 7)
    assert files_in(two) == before


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def newer(path):
    found = json.loads(path.read_bytes()) | {"version": 3}
    path.write_bytes(manifest.encode(found))


def shorter(path):
    found = json.loads(path.read_bytes())
    found["files"][SHARD]["holds"]["b"]["stop"] = 4
    path.write_bytes(manifest.encode(found))


SHARD, MANIFEST = "rank-000.safetensors", "manifest.json"
BROKEN = {
    "a byte of payload": (
        SHARD,
        lambda p: flip(p, -1),
        "is damaged: the checksum of a.weight is wrong",
    ),
    "a byte of the header": (
        SHARD,
        lambda p: flip(p, 12),
        "is damaged: the checksum of its header is wrong",
    ),
    "a shorter file": (SHARD, lambda p: os.truncate(p, 90), "is truncated: 90 bytes, not"),
    "a longer file": (SHARD, lambda p: p.write_bytes(p.read_bytes() + b"0"), "is damaged: "),
    "no file": (SHARD, lambda p: p.unlink(), "is missing; remove its folder to go on from"),
    "an array of another length": (
        SHARD,
        lambda p: shorter(p.with_name(MANIFEST)),
        "has another b than its manifest says",
    ),
    "a shorter manifest": (MANIFEST, lambda p: os.truncate(p, 90), "is damaged: it is no JSON"),
    "a byte of the manifest": (
        MANIFEST,
        lambda p: p.write_bytes(p.read_bytes().replace(b'"step": 7', b'"step": 8')),
        "is damaged: its checksum is wrong; remove its folder",
    ),
    "another program's": (MANIFEST, lambda p: p.write_text('{"weights": []}'), "is foreign"),
    "a newer version": (MANIFEST, newer, "has version 3, and this minidist reads version 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_and_nothing_is_overwritten(two, name):
    file, breaks, message = BROKEN[name]
    path = two / "step-00000007" / file
    breaks(path)
    before = files_in(two)
    with pytest.raises(ValueError, match=rf"{path} {message}"):
        checkpoint.load(two)
    with pytest.raises(ValueError, match=rf"{path} {message}"):  # as a rank reads its parts
        saved = Saved.newest(two)
        assert [saved.whole(name) for name in saved.shapes]
    assert files_in(two) == before


def test_two_runs_in_one_folder_are_told(two, monkeypatch):
    """The other run removed what this one was about to remove."""
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory")
    monkeypatch.setattr(writing, "remove", mock.Mock(side_effect=[None, gone]))
    with pytest.raises(ValueError, match=r"cannot remove old .*: No such file .* a folder of it"):
        checkpoint.save(two, state(), 8)
    assert checkpoint.load(two)[1] == 8


@given(st.data())
def test_whichever_bit_of_whichever_file_flips_it_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint.save(folder, state(), 1, about={"seed": 3})
    path = folder / "step-00000001" / data.draw(st.sampled_from([SHARD, MANIFEST]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found, step = checkpoint.load(folder)
    except ValueError as error:
        assert str(path) in str(error)
    else:  # a space of the manifest that became a tab
        assert path.name == MANIFEST and step == 1
        assert_same_bits(found, state())


def test_a_folder_that_has_none_or_is_a_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no-such has no checkpoint"):
        checkpoint.load(tmp_path / "no-such")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot read the folder .*file: Not a directory"):
        checkpoint.load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"cannot write to the folder .*file: Not a directory"):
        checkpoint.save(tmp_path / "file", state(), 1)


@pytest.mark.parametrize("when", ["shard", "fsync", "manifest"])
def test_a_full_disk_ends_the_run_with_the_old_checkpoint_whole(cluster, two, monkeypatch, when):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_, **__):
        raise full

    if when == "manifest":
        monkeypatch.setattr(writing, "write", fails)
    elif when == "shard":
        monkeypatch.setattr("safetensors.numpy.serialize_file", fails)
    else:
        monkeypatch.setattr(writing, "finish", fails)
    before = files_in(two)

    def worker(group):
        checkpoint.save(two, state(group.rank), 9, group)

    with pytest.raises(RankFailed, match="No space left on device; those before it are whole"):
        cluster(2, "thread").run(worker)
    monkeypatch.undo()
    assert checkpoint.load(two)[1] == 7
    assert {n: d for n, d in files_in(two).items() if "step-00000009" not in n} == before


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a file system of 64 KiB")
def test_a_disk_that_is_really_full(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "x", tmp_path]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        checkpoint.save(tmp_path, state(), 1)
        with pytest.raises(ValueError, match="those before it are whole"):
            checkpoint.save(tmp_path, {"a": np.ones(20000)}, 2)
        assert_same_bits(checkpoint.load(tmp_path)[0], state())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


SAVES = """
import sys, numpy as np
from minidist import checkpoint
step = 0
while True:
    step += 1
    checkpoint.save(sys.argv[1], {"a": np.full(1 << 17, float(step))}, step)
    print(step, flush=True)
"""


@pytest.mark.parametrize(
    "kill", [0, *(pytest.param(kill, marks=pytest.mark.slow) for kill in range(1, 8))]
)
def test_whenever_the_writer_is_killed_the_newest_whole_checkpoint_is_loaded(tmp_path, kill):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(3 + kill)]
        signal.sigtimedwait([], np.random.default_rng(kill).uniform(0, 0.01))
        process.kill()
        said += process.stdout.readlines()
    found, step = checkpoint.load(tmp_path)
    assert step in (int(said[-1]), int(said[-1]) + 1)  # it was killed before it could say so
    np.testing.assert_array_equal(found["a"], np.full(1 << 17, float(step)))


def test_every_rank_writes_parts_and_what_all_hold_is_written_once(cluster, tmp_path):
    def worker(group):
        checkpoint.save(tmp_path, state(), 4, group, about={"by": group.rank})
        return checkpoint.load(tmp_path)

    for found, step in cluster(3, "thread").run(worker):
        assert_same_bits(found, state())
        assert step == 4
    files = json.loads((tmp_path / "step-00000004" / MANIFEST).read_bytes())["files"]
    assert {name: list(f["holds"]) for name, f in files.items()} == {
        "rank-000.safetensors": ["a.weight"],
        "rank-001.safetensors": ["b"],
    }
    assert checkpoint.Saved.newest(tmp_path).about == {"by": 0}


def test_without_the_library_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ValueError, match=r"pip install 'minidist\[checkpoint\]'"):
        checkpoint.save(tmp_path, state(), 1)
    assert not any(tmp_path.iterdir())


def test_an_array_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="words is <U3; a checkpoint holds numbers"):
        checkpoint.save(tmp_path, {"words": np.array(["abc"])}, 1)
