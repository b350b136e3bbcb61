"""The files of a checkpoint: what is read back, what counts, what is refused, what is left."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import checkpoint, nn
from minidist.checkpoint import Part, manifest, writing
from minidist.checkpoint.manifest import COLUMNS, ROWS, checksum
from minidist.checkpoint.reading import Saved
from minidist.errors import RankFailed
from tests.strategies import arrays, assert_same_bits, seeds, shapes


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
    found["arrays"]["b"]["shape"] = [4]
    path.write_bytes(manifest.encode(found))


SHARD, MANIFEST = "rank-000.safetensors", "manifest.json"
BROKEN = {
    "a byte of payload": (
        SHARD,
        lambda p: flip(p, -1),
        "is damaged: the checksum of a.weight is wrong",
    ),
    "a shorter file": (SHARD, lambda p: os.truncate(p, 90), "is truncated: 90 bytes, not"),
    "an array of another length": (
        SHARD,
        lambda p: shorter(p.with_name(MANIFEST)),
        "has another b than its manifest says",
    ),
    "a byte of the manifest": (
        MANIFEST,
        lambda p: p.write_bytes(p.read_bytes().replace(b'"step": 7', b'"step": 8')),
        "is damaged: its checksum is wrong",
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
    with pytest.raises(ValueError, match=rf"{path} {message}") as error:
        checkpoint.load(two)
    strange = name in ("another program's", "a newer version")
    assert strange or "step 3 is whole: go on from it with --resume-from 3" in str(error.value)
    assert_same_bits(checkpoint.load(two, step=3)[0], state(3))
    with pytest.raises(ValueError, match=rf"{path} {message}"):  # as a rank reads its parts
        saved = Saved.newest(two)
        assert [saved.whole(name) for name in saved.shapes]
    assert files_in(two) == before


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


@pytest.mark.parametrize(
    "when",
    ["safetensors.numpy.serialize_file", "os.replace", "minidist.checkpoint.manifest.encode"],
)
def test_a_full_disk_ends_the_run_with_the_old_checkpoint_whole(cluster, two, monkeypatch, when):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(when, full)
    before = files_in(two)

    def worker(group):
        checkpoint.save(two, state(group.rank), 9, group)

    with pytest.raises(
        RankFailed, match="No space left on device; those before it, if any, are whole"
    ):
        cluster(2, "thread").run(worker)
    monkeypatch.undo()
    assert checkpoint.load(two)[1] == 7
    assert files_in(two) == before  # also nothing of what the other rank has written


SAVES = """
import sys, numpy as np
from minidist import checkpoint
step = 0
while True:
    step += 1
    checkpoint.save(sys.argv[1], {"a": np.full(1 << 17, float(step))}, step)
    print(step, flush=True)
"""


def test_whenever_the_writer_is_killed_the_newest_whole_checkpoint_is_loaded(tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(3)]
        signal.sigtimedwait([], np.random.default_rng().uniform(0, 0.01))
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


# What may be saved.

EMPTY = nn.Slice("a", (4,), None, 0, 4)

DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 >i2 >i8 >u4 >f2 >f4 >f8 =q =Q =l".split()
REFUSED = "g G F D U3 S2 M8[D] m8[s] O V4 i4,f4".split()
ORDERS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "transposed": np.transpose,
    "reversed": lambda a: a[..., ::-1] if a.ndim else a,
    "every other": lambda a: a[..., ::2] if a.ndim else a,
    "repeated": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "read-only": lambda a: np.broadcast_to(a, a.shape),
    "masked": np.ma.array,
}
KINDS = {"int": int, "bool": bool, "float": float, "str": str, "array": np.array} | {
    name: getattr(np, name) for name in ("int8", "uint8", "int32", "int64", "uint64", "float64")
}


@st.composite
def anything(draw):
    """Draw a state and a step that a caller might think of."""
    names = st.one_of(
        st.text(st.characters(), max_size=5),  # all of Unicode: lone surrogates, too
        st.sampled_from(
            ["__metadata__", "a", "a#1", "a#2", "a/b", "é", "e\u0301", "\0", "x" * 4097]
        ),
    )
    shape = shapes(max_axes=3, max_side=3, min_side=0)
    state = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        array = 9 * arrays(*draw(shape), seed=draw(seeds))
        dtype = np.dtype(draw(st.sampled_from(DTYPES * 3 + REFUSED)))
        array = np.asarray(abs(array) if dtype.kind == "u" else array).astype("i8").astype(dtype)
        state[name] = ORDERS[draw(st.sampled_from([*ORDERS]))](array)
    whole = st.one_of(st.integers(-1, 127), st.integers(2**63 - 2, 2**63 + 1))
    number = draw(whole if draw(st.booleans()) else st.integers(0, 127))
    kind = draw(st.sampled_from(["int", *KINDS]))
    return state, number if abs(number) > 127 else KINDS[kind](number)


@given(anything())
def test_what_is_saved_is_loaded_and_what_is_refused_leaves_no_file(tmp_path_factory, drawn):
    state, step = drawn
    folder = tmp_path_factory.mktemp("any")
    try:
        checkpoint.save(folder, state, step)
    except ValueError:
        assert not files_in(folder)
        of_step = type(step) in (bool, str, float, np.float64) or not 0 <= step < 2**63
        kinds = {array.dtype.kind for array in state.values()}
        long = any(array.dtype.char in "gG" for array in state.values())
        masked = any(isinstance(array, np.ma.MaskedArray) for array in state.values())
        names = any(n == "__metadata__" or len(n) > 4096 or not writable(n) for n in state)
        assert of_step or kinds - set("?biuf") or long or masked or names, drawn
    else:
        found, number = checkpoint.load(folder)
        assert number == step and type(number) is int
        assert found.keys() == state.keys()
        for name, array in state.items():
            assert found[name].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found[name], array)


def writable(name):
    return name.encode(errors="ignore").decode() == name


def nested(depth):
    """Return a dict that has a dict, and so on."""
    inner = {}
    for _ in range(depth - 1):
        inner = {"in": inner}
    return inner


CANNOT_BE_SAVED = [
    ({"step": -1}, "a step is a whole number from 0 to 9223372036854775807, not -1"),
    ({"step": 5}, "of step 7, and step 5 is before it"),
    ({"step": 7}, "there already; resume"),
    ({"step": 1.5}, "a step is a whole number from 0 .* not 1.5"),
    ({"state": {"__metadata__": np.ones(3)}}, "'__metadata__' is no name of an array; use"),
    ({"state": {7: np.ones(3)}}, "7 is no name of an array; use another string"),
    ({"state": {"\ud800": np.ones(3)}}, "is no name of an array: UTF-8 cannot write it"),
    ({"state": {"é" * 2049: np.ones(3)}}, r"ééé\.\.\. has 4098 bytes; a name has 4096 at most"),
    ({"state": {"o": np.array([{}])}}, "o is object; a checkpoint holds numbers"),
    (
        {"state": {"m": np.ma.array([1.0, 2], mask=[0, 1])}},
        "m is masked, and a file has no mas",
    ),
    ({"state": [Part(EMPTY, np.ones(3))]}, "a part of a has 3 elements for 4 places"),
    (
        {"state": [Part(EMPTY.within(1, 4), np.ones(3))]},
        "the ranks do not hold all 4 elements of a",
    ),
    ({"about": {"a": object()}}, "about is to be JSON: Object of type object is not"),
    ({"about": {"a": [{1: 2}]}}, "about is to be a dict whose keys, and those in it, are str"),
    ({"about": {"run": "a"}}, "about's run is to be a list of names"),
    ({"about": nested(101)}, "about is to be a dict .* and no more than 100 in each other"),
    ({"about": nested(10**5)}, "about is to be JSON: maximum recursion depth"),
    ({"folder": ""}, "'' is no folder; the one where you are is '.'"),
    ({"folder": "x" * 256}, "cannot write to the folder x*/step-00000008: File name too long"),
]


def test_what_cannot_be_saved_is_refused_before_a_byte_is_written(two, monkeypatch):
    monkeypatch.chdir(two)
    before = {*two.rglob("*")}
    for more, message in CANNOT_BE_SAVED:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(**{"folder": ".", "state": state(), "step": 8} | more)
        assert {*two.rglob("*")} == before


def by(*names):
    return {"about": {"run": [*names]}}


OTHER = r"is of another run; use another folder, or go on from it with --resume"


def test_no_run_saves_where_another_one_has_saved(two):
    """A run that goes on has the names of those before it; without names all are one run."""
    checkpoint.save(two, state(8), 8, **by("", "a"))
    checkpoint.save(two, state(9), 9, **by("", "a"))
    before = files_in(two)
    for other in ({}, by("b"), by("", "b")):
        with pytest.raises(ValueError, match=f"step-00000009 {OTHER}"):
            checkpoint.save(two, state(20), 20, **other)
    assert files_in(two) == before
    checkpoint.save(two, state(20), 20, about={"run": [*Saved.newest(two).run, "c"]})
    with pytest.raises(ValueError, match=f"step-00000020 {OTHER}"):  # a and c went on from 9
        checkpoint.save(two, state(30), 30, **by("", "a"))


def test_a_run_has_what_another_saved_until_it_left_that_one_and_no_later_work(tmp_path):
    """b goes on from a's step 20; a is alive, and saves 30: that is not b's to remove."""
    for step in (20, 30):
        checkpoint.save(tmp_path, state(step), step, **by("a"))
    for step in (45, 70):
        with pytest.raises(ValueError, match=f"step-00000030 {OTHER}"):
            checkpoint.save(tmp_path, state(step), step, **by("a@20", "b"))
    checkpoint.save(tmp_path, state(45), 45, **by("a@30", "b"))
    with pytest.raises(ValueError, match=f"step-00000045 {OTHER}"):
        checkpoint.save(tmp_path, state(60), 60, **by("a"))


@pytest.mark.parametrize("run, message", [({}, "is there already"), (by("b"), OTHER)])
def test_what_another_run_saves_before_the_lock_is_there_is_not_removed(
    tmp_path, monkeypatch, run, message
):
    @contextmanager
    def late(folder):
        monkeypatch.undo()
        checkpoint.save(tmp_path, state(1), 10, **run)
        with writing.alone_in(folder):
            yield

    monkeypatch.setattr(writing, "alone_in", late)
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path, state(2), 10)
    assert_same_bits(checkpoint.load(tmp_path)[0], state(1))


def test_only_a_run_that_went_on_from_a_step_is_set_aside_after_it(two):
    checkpoint.save(two / "other", state(8), 8, **by("a"))
    (two / "other" / "step-00000008").rename(two / "step-00000008")
    with pytest.raises(ValueError, match="step-00000008 is of another run"):
        checkpoint.set_aside(two, after=7)
    assert sorted(manifest.whole_ones(two)) == [3, 7, 8]
    with writing.alone_in(two), pytest.raises(ValueError, match="another run is saving in"):
        checkpoint.set_aside(two, after=3)


def test_two_runs_do_not_save_in_one_folder_at_the_same_time(two, monkeypatch):
    def meanwhile(*given):
        monkeypatch.undo()
        for step in (10, 11):
            with pytest.raises(
                ValueError, match=r"another run is saving in .*; give each a folder"
            ):
                checkpoint.save(two, state(step), step)
        complete(*given)

    complete = writing.complete
    monkeypatch.setattr(writing, "complete", meanwhile)
    checkpoint.save(two, state(10), 10)
    assert_same_bits(checkpoint.load(two)[0], state(10))
    checkpoint.save(two, state(11), 11)


@pytest.mark.parametrize("wrong", ["array", "step", "another shape"])
def test_all_ranks_raise_what_one_of_them_cannot_save_and_go_on_together(cluster, two, wrong):
    before, ones = files_in(two), np.ones(3)
    state, step = {
        "array": ({"a": np.array([{}])}, 9),
        "step": ({"a": ones}, 3),
        "another shape": ({"a": np.ones(4)}, 9),
    }[wrong]

    def worker(group):
        with pytest.raises(ValueError) as error:
            checkpoint.save(two, *((state, step) if group.rank else ({"a": ones}, 9)), group)
        unchanged = files_in(two) == before
        group.barrier()
        checkpoint.save(two, {"a": ones}, 9, group)
        return unchanged, str(error.value).removesuffix(" (rank 1)")

    first, second = cluster(2, "thread").run(worker)
    assert first == second and first[0]
    assert checkpoint.load(two)[1] == 9


# Links, and what others have put there.


@pytest.fixture
def victim(tmp_path_factory):
    """A folder of somebody else's, whose files have names that a checkpoint's have, too."""
    folder = tmp_path_factory.mktemp("victim")
    for name in (SHARD, MANIFEST, f"{SHARD}.tmp", f"{MANIFEST}.tmp", "notes.tmp"):
        (folder / name).write_text("precious")
    return folder


def test_a_step_folder_that_is_a_link_is_not_written_to(two, victim):
    for target in (victim, two / "nowhere", two / "step-00000003"):
        (two / "step-00000009").symlink_to(target)
        before = files_in(victim), files_in(two)
        with pytest.raises(
            ValueError, match="step-00000009 is a link, and none is followed; remove"
        ):
            checkpoint.save(two, state(), 9)
        assert (files_in(victim), files_in(two)) == before
        (two / "step-00000009").unlink()


def test_nothing_is_removed_through_a_link(two, victim):
    (two / "step-00000001").symlink_to(victim)
    (two / "step-00000002").symlink_to(two / "nowhere")
    before = files_in(victim)
    for name in before:
        if not (two / "step-00000003" / name).exists():
            (two / "step-00000003" / name).symlink_to(victim / name)
    (two / "step-00000008").mkdir()  # a run died there
    for name in before:
        if name != MANIFEST:
            (two / "step-00000008" / name).symlink_to(victim / name)
    for step in (8, 9):
        checkpoint.save(two, state(step), step)
        assert files_in(victim) == before
        assert_same_bits(checkpoint.load(two)[0], state(step))
    assert (two / "step-00000001").is_symlink() and (two / "step-00000002").is_symlink()


def test_newer_checkpoints_are_set_aside_and_can_be_put_back(two):
    names = ["aside-step-00000007", "aside-step-00000007#1"]
    for name in names:
        assert checkpoint.set_aside(two, after=3) == [two / name]
        assert checkpoint.load(two)[1] == 3
        checkpoint.save(two, state(7), 7)
    for step in (8, 9):
        checkpoint.save(two, state(step), step)
    assert {path.name for path in two.iterdir()} == {*names, "step-00000008", "step-00000009"}
    assert checkpoint.set_aside(two, after=9) == []
    (two / names[0]).rename(two / "step-00000007")
    assert_same_bits(checkpoint.load(two, step=7)[0], state(7))


def test_the_begun_checkpoint_of_a_later_step_stays(two):
    begun = two / "step-00000009" / "rank-000.safetensors.tmp"
    begun.parent.mkdir()
    begun.write_bytes(b"half of it")
    checkpoint.save(two, state(), 8)
    assert begun.read_bytes() == b"half of it"
    checkpoint.save(two, state(), 9)
    assert not begun.exists() and checkpoint.load(two)[1] == 9


def test_a_link_that_appears_while_a_checkpoint_is_written_is_not_followed(
    two, victim, monkeypatch
):
    def late(*given):
        (two / "step-00000009" / f"{MANIFEST}.tmp").symlink_to(victim / MANIFEST)
        complete(*given)

    before, complete = files_in(victim), writing.complete
    monkeypatch.setattr(writing, "complete", late)
    with pytest.raises(ValueError, match="File exists; those before it, if any, are whole"):
        checkpoint.save(two, state(9), 9)
    assert files_in(victim) == before and checkpoint.load(two)[1] == 7


def test_files_that_others_call_temporary_stay(two):
    old, begun = two / "step-00000003", two / "step-00000009"
    begun.mkdir()
    foreign = "notes.tmp rank-000.tmp rank-1.safetensors.tmp .tmp .tmp8Zk32 .tmp8Zk32Z7".split()
    foreign += [".tmp8Zk32Z.tmp", "rank-٠٠٠.safetensors"]
    for name in foreign:
        (old / name).write_text(name)
        (begun / name).write_text(name)
    for name in (f"{SHARD}.tmp", f"{MANIFEST}.tmp", "rank-1234.safetensors"):
        (old / name).touch()
    checkpoint.save(two, state(), 9)
    assert sorted(path.name for path in old.iterdir()) == sorted(foreign)
    assert {name for name in foreign if (begun / name).read_text() == name} == {*foreign}


ROW, BLOCK = 8 * COLUMNS, 8 * COLUMNS * ROWS
SIZE = 2 * BLOCK + 1001  # two blocks, and bytes that are left over
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def columns_by_hand(data: bytes) -> str:
    """Return the checksum, each sum added up as a whole number."""
    digest = hashlib.sha256()
    for block in range(len(data) // BLOCK):
        for column in range(COLUMNS):
            places = [block * BLOCK + row * ROW + 8 * column for row in range(ROWS)]
            total = sum(int.from_bytes(data[at : at + 8], "little") for at in places)
            digest.update((total % 2**64).to_bytes(8, "little"))
    digest.update(data[len(data) // BLOCK * BLOCK :])
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, SIZE])
def test_it_is_the_hash_of_the_sums_and_of_what_is_left_over(size):
    assert checksum(CONTENT[:size]) == columns_by_hand(CONTENT[:size].tobytes())


@given(st.integers(0, 9), st.sampled_from(["u1", "f2", "f4", "f8"]))
def test_it_is_of_the_bytes_whatever_their_dtype_and_their_place(shift, dtype):
    memory = np.empty(SIZE + 9, np.uint8)
    moved = memory[shift : shift + BLOCK]
    moved[...] = CONTENT[:BLOCK]
    want = checksum(CONTENT[:BLOCK].tobytes())
    assert checksum(moved) == want
    assert checksum(CONTENT[:BLOCK].view(dtype).reshape(2, -1)) == want
