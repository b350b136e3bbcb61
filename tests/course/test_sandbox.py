"""What the student's process can do, and what the grader reads of what it leaves."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from minidist.course.sandbox import Sandbox, bubblewrap
from minidist.course.sandbox.inside.values import encode
from minidist.course.sandbox.limits import LINUX, Limits, claim_user
from minidist.course.sandbox.supervisor import defences, folders
from minidist.course.sandbox.untrusted import NoAnswer, read, remove, remove_files_of
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.tiny import GPIPE, MODULE, NOT_WRAPPED, OTHER, TINY, WRAPPED, choose

ROOT = Path(__file__).parents[2]
LIMITS = Limits(seconds=20)
CLONE = {"x86_64": 56, "aarch64": 220}
pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(not LINUX, reason="needs Linux")
both_ways = pytest.mark.parametrize("wrapped", [WRAPPED, NOT_WRAPPED])


def called(sandbox, name, **given):
    """Return what a function of tiny_tests.py returns there, in a process of its own."""
    return sandbox.call([(MODULE, name, given)]).answers[0]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(TINY, LIMITS) as sandbox:
        yield sandbox


def test_arrays_come_back_as_they_were_and_what_is_none_is_said(sandbox):
    given = {
        "float": np.linspace(0, 1, 6).reshape(2, 3).T,
        "half": np.float16([1.5]),
        "bool": np.array([[True], [False]]),
        "text": np.array(["all", "reduce ✓"]),
        "empty": np.zeros((0, 3), np.int8),
    }
    said = {
        "object": "x should be an array of numbers, and is of object: ",
        "complex": "x should be an array of numbers, and is of complex128: (1+2j)",
        "structured": "x should be an array of numbers",
        "a function": "TypeError: answer should be an array of numbers, and is of object: <b",
        "large": "more than 16 MB",
        "interrupt": "KeyboardInterrupt",
    }
    misuses = [(MODULE, "misuse", {"how": how}) for how in said]
    *misused, answer = sandbox.call([*misuses, (MODULE, "echo", given)]).answers
    for got, words in zip(misused, said.values(), strict=True):
        assert words in got
    assert answer.keys() == given.keys(), "the next call is answered"
    for name, array in given.items():
        assert answer[name].dtype == array.dtype and np.array_equal(answer[name], array)


@both_ways
def test_the_students_process_finds_nothing_of_the_grader_around_it(wrapped, monkeypatch):
    choose(monkeypatch, wrapped)
    with Sandbox(TINY, LIMITS) as sandbox:
        found = called(sandbox, "surroundings")
        rights = sandbox.tree.parent.stat().st_mode & 0o777
    assert not any("site-packages" in path for path in found["path"])
    assert str(ROOT) not in found["path"] and found["path"][0] == str(sandbox.tree)
    assert not any(name.startswith("PYTHON") for name in found["environment"])
    assert Path(str(found["folder"])).name == "scratch" and found["threads"] == 1
    assert found["descriptors"].tolist()[:3] == [0, 1, 2]
    assert found["course"].tolist() == [
        f"minidist.course.labs{name}" for name in ("", ".tiny", ".tiny.tiny_tests")
    ]
    limits = found["limits"].tolist()
    want = {0: 42, 1: 2 << 30, 2: 1 << 26, 3: 256, 4: 0}  # CPU, AS, FSIZE, NOFILE, CORE
    assert all(limits[k] == [most, most] for k, most in want.items())
    if LINUX:
        assert found["ends with the supervisor"] == 9 and limits[5][1] >= 256
    if LINUX and os.geteuid() == 0:
        assert limits[5] == [256, 256] and rights == 0o750
        same = found["network"] == os.stat("/proc/self/ns/net").st_ino
        assert same == ("to use the network" in sandbox.defences)
        assert len(set(found["user"].tolist())) == 1 and found["user"][0] >= 61184


@both_ways
def test_the_students_code_does_not_reach_the_host_nor_memory_of_no_process(wrapped, monkeypatch):
    choose(monkeypatch, wrapped)
    closed = [str(ROOT / "tests"), str(PACKAGE / "comm"), "/home", "/sys"] if wrapped else []
    open_to_all = ["/tmp", "/dev/shm"] if wrapped else []
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Sandbox(TINY, LIMITS) as sandbox:
        sandbox.build({})
        writable = [str(sandbox.tree), str(ROOT), "/etc", "/dev", *open_to_all]
        given = {"readable": closed, "writable": writable, "port": listener.getsockname()[1]}
        found = called(sandbox, "tries", **given)
        hidden = {"fork": "done"}
        if LINUX and os.uname().machine in CLONE:
            hidden = called(sandbox, "hidden_memory", clone=CLONE[os.uname().machine])
    done = {name for name, outcome in found.items() if outcome == "done"}
    network = {"connect"} if "to use the network" in sandbox.defences else set()
    assert done == {"own file", "nothing"} | network
    assert {str(way) for way, outcome in hidden.items() if str(outcome) == "done"} == {"fork"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_another_user_leaves_where_all_can_write_is_removed():
    user, claim = claim_user()
    with claim, tempfile.TemporaryDirectory(dir="/tmp") as mine:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        (folder / "file").touch()
        os.chown(folder, user, user)
        remove_files_of(user)
        assert not folder.exists() and Path(mine).exists()


def test_a_grade_says_which_defences_there_were_and_what_is_not_prevented():
    for given, line in {
        (7, None, False): "bubblewrap, user 7, limits",
        (7, "why", True): "user 7, limits, no network; no bubblewrap .why., so .* all users can",
        (None, "why", False): "limits; .* end what the grading user can, to use the network",
    }.items():
        assert re.fullmatch(line, defences(*given))


@linux
def test_bubblewrap_is_used_where_it_has_run_python(tmp_path, monkeypatch):
    probe = bubblewrap.why_not.__wrapped__
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe(False, folders()) == "it is not installed"
    command = tmp_path / "bwrap"
    command.write_text("#!/bin/sh\necho bwrap: no permissions >&2\nexit 1\n")
    command.chmod(0o755)
    assert probe(False, folders()) == "bwrap: no permissions"
    command.write_text('#!/bin/sh\nwhile [ "$1" != -I ]; do python=$1; shift; done; $python "$@"\n')
    assert probe(False, folders()) is None


def test_a_machine_on_which_root_is_the_only_user_still_asks(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    choose(monkeypatch, wrapped=False)
    with Sandbox(TINY, LIMITS) as sandbox:
        assert called(sandbox, "echo", x=7)["x"] == 7
    assert sandbox.defences.startswith("limits; no bubblewrap")


def test_a_sandbox_that_does_not_start_is_no_students_fault(monkeypatch):
    monkeypatch.setattr("minidist.course.sandbox.supervisor.INSIDE", ROOT / "tests" / "nothing")
    message = r"does not start: .*can't find|does not start: .*open"
    with Sandbox(TINY, LIMITS) as sandbox, pytest.raises(RuntimeError, match=message):
        called(sandbox, "echo", x=7)


def test_files_of_one_task_that_cannot_be_imported_do_not_spoil_the_others(sandbox):
    source = (PACKAGE / OTHER).read_text(encoding="utf-8")
    for bad, said in {
        "1 / 0": "ZeroDivisionError",
        "x = '\0'": "null bytes",
        "(" * 5000: "",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
    }.items():
        wrong = sandbox.put({GPIPE: bad, OTHER: source})
        assert wrong.keys() == {GPIPE} and said in wrong[GPIPE]
        assert (sandbox.tree / "minidist" / OTHER).read_text(encoding="utf-8") == source
        assert "Task 9.1" in (sandbox.tree / "minidist" / GPIPE).read_text(encoding="utf-8")


def test_the_copy_holds_nothing_compiled_and_of_the_labs_tests_what_runs_inside(sandbox):
    sandbox.build({})
    names = {path.name for path in sandbox.tree.rglob("*")}
    assert "gpipe.py" in names and not {"__pycache__", "tests", "mistakes"} & names
    course = sandbox.tree / "minidist" / "course"
    files = {path.relative_to(course).as_posix() for path in course.rglob("*") if path.is_file()}
    text = (course / "labs" / "tiny" / "tiny_tests.py").read_text(encoding="utf-8")
    assert "def order" in text and "def test_" not in text and "pytest" not in text
    assert files == {f"labs/{name}.py" for name in ("__init__", "ranks", "tiny/tiny_tests")}


def forged():
    """Yield what a student's process could leave in place of an answer."""
    yield from (b"", b"\n", b"[" * 100000, b"{}", b"7\n", b"\xff\xfe\n", b"PK\x03\x04" + bytes(100))
    yield b'{"dict": [["mistake", 1]]}\n'
    yield b'{"dict": [["answer", 1], ["error", ""]]}\n'
    values = [[2**62], [2**62, 2**62, 0, 4], [-1], [2.0], [[2]], [2**62] * 10000]
    arrays = [("<f8", shape) for shape in values]
    kinds = "|O f4,f4 (2,)f4 M8[s] V8 <c16 no_type <U2147483647".split()
    arrays += [(kind, [1]) for kind in [*kinds, "f4," * 10000]]
    arrays += [("<U0", [3]), (None, []), ("x",), ("<i8", [10**12, 0])]
    others = [{"dict": [[[], 1]], "array": []}, {"dict": 7}, {"object": "x"}, ["x" * 1000] * 300]
    others += [[{"array": ["<f8", []]}] * 100000, *({"array": array} for array in arrays)]
    for value in others:
        yield json.dumps({"dict": [["answer", value]]}).encode() + b"\n" + bytes(64)
    for (kind, shape), data in {
        ("<f8", (2,)): bytes(15),  # cut off
        ("<U2", ()): b"a\0\0\0\xff\xff\xff\x7f",  # no Unicode
        (">U1", (2,)): b"\0\0\0a\0\x11\0\0",  # one above the last
    }.items():
        yield json.dumps({"dict": [["answer", {"array": [kind, shape]}]]}).encode() + b"\n" + data


def test_a_forged_answer_is_a_text_and_so_is_what_is_no_file(tmp_path):
    for content in forged():
        (tmp_path / "0").write_bytes(content)
        begin = time.monotonic()
        assert read(tmp_path / "0") == "the answer is not what the sandbox writes", content[:99]
        assert isinstance(read(tmp_path / "0"), NoAnswer) and time.monotonic() - begin < 4
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(__file__)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder", "missing"):
        assert isinstance(read(tmp_path / name), NoAnswer)
    (tmp_path / "0").write_bytes(encode({"error": "x" * 10000}))
    assert read(tmp_path / "0") == "x" * 4000


def test_a_folder_is_removed_however_deep_and_closed_it_is(tmp_path):
    folder, here = tmp_path / "folder", os.getcwd()
    folder.mkdir()
    try:
        os.chdir(folder)
        for _ in range(1100):
            os.mkdir("deep")
            os.chdir("deep")
        os.symlink(here, "link")
        os.chmod(".", 0)
    finally:
        os.chdir(here)
    (folder / "closed").mkdir(mode=0)
    remove(folder)
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import sys, tempfile
from minidist.cli import main
from minidist.course import lab
from minidist.course.sandbox import bubblewrap
from tests.course.tiny import TINY
tempfile.tempdir, lab.find = sys.argv[2], lambda name: TINY
if sys.argv[3] == "False":
    bubblewrap.why_not = lambda *_: "it is not wanted"
sys.exit(main(["lab", "grade", sys.argv[1], "--lab", "tiny"]))
"""


@linux
@both_ways
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_grader_leaves_no_process_and_none_but_a_killed_one_a_folder(kind, wrapped):
    attack = Path(__file__).with_name("attacks") / "endless_loop"
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        words = [sys.executable, "-c", INTERRUPTED, attack, place, str(wrapped)]
        with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as grader:
            until(lambda: supervised(place))
            grader.send_signal(kind)
            grader.wait(timeout=60)
            until(lambda: not supervised(place))
            if kind != signal.SIGKILL:
                assert os.listdir(place) == []
        for folder in Path(place).iterdir():
            remove(folder)


def supervised(place):
    """Return the processes whose folder is in `place`: the student's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "cwd").readlink()).startswith(place):
                found.append(entry.name)
        except OSError:
            continue
    return found


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
