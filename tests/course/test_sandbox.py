"""What the student's process can do, and what the grader reads of what it leaves."""

import json
import os
import re
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
from minidist.verify.mistakes.register import module_of
from tests.course.tiny import GPIPE, MODULE, NOT_WRAPPED, OTHER, TINY, WRAPPED, choose

ROOT = Path(__file__).parents[2]
LIMITS = Limits(seconds=20)
CLONE = {"x86_64": 56, "aarch64": 220}
linux = pytest.mark.skipif(not LINUX, reason="needs Linux")


def called(sandbox, name, **given):
    """Return what a function of tiny_tests.py returns there, in a process of its own."""
    return sandbox.call([(MODULE, name, given)]).answers[0]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(TINY, LIMITS) as sandbox:
        yield sandbox


def test_arrays_come_back_as_they_were(sandbox):
    given = {
        "float": np.linspace(0, 1, 6).reshape(2, 3).T,
        "half": np.float16([1.5]),
        "bool": np.array([[True], [False]]),
        "text": np.array(["all", "reduce ✓"]),
        "empty": np.zeros((0, 3), np.int8),
    }
    answer = called(sandbox, "echo", **given)
    assert answer.keys() == given.keys()
    for name, array in given.items():
        assert answer[name].dtype == array.dtype and answer[name].shape == array.shape
        assert np.array_equal(answer[name], array)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("object", "x should be an array of numbers, and is of object: "),
        ("complex", "x should be an array of numbers, and is of complex128: (1+2j)"),
        ("structured", "x should be an array of numbers"),
        ("a function", "TypeError: answer should be an array of numbers, and is of object: <b"),
        ("large", "more than 16 MB"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_what_is_no_answer_is_said_and_the_next_question_goes_on(sandbox, how, said):
    calls = [(MODULE, "misuse", {"how": how}), (MODULE, "echo", {"x": 7})]
    misused, answer = sandbox.call(calls).answers
    assert said in misused and answer["x"] == 7


def test_ranks_that_are_threads_fit_the_limits(sandbox):
    answer = called(sandbox, "ranks", size=8)
    assert np.array_equal(answer["sum"], np.full(1000, 8.0))


@pytest.mark.parametrize("wrapped", [WRAPPED, NOT_WRAPPED])
def test_the_students_process_finds_nothing_of_the_grader_around_it(wrapped, monkeypatch):
    choose(monkeypatch, wrapped)
    with Sandbox(TINY, LIMITS) as sandbox:
        found = called(sandbox, "surroundings")
        rights = sandbox._folder.stat().st_mode & 0o777
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


@pytest.mark.parametrize("wrapped", [WRAPPED, NOT_WRAPPED])
def test_the_students_code_does_not_reach_the_host(wrapped, monkeypatch):
    choose(monkeypatch, wrapped)
    closed = [str(ROOT / "tests"), str(PACKAGE / "comm"), "/home", "/sys"] if wrapped else []
    open_to_all = ["/tmp", "/dev/shm"] if wrapped else []
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Sandbox(TINY, LIMITS) as sandbox:
        sandbox.build({})
        writable = [str(sandbox.tree), str(ROOT), "/etc", "/dev", *open_to_all]
        given = {"readable": closed, "writable": writable, "port": listener.getsockname()[1]}
        found = called(sandbox, "tries", **given)
    done = {name for name, outcome in found.items() if outcome == "done"}
    network = {"connect"} if "to use the network" in sandbox.defences else set()
    assert done == {"own file", "nothing"} | network


@linux
@pytest.mark.skipif(os.uname().machine not in CLONE, reason="needs x86-64 or arm64")
@pytest.mark.parametrize("wrapped", [WRAPPED, NOT_WRAPPED])
def test_memory_that_belongs_to_no_process_is_refused(wrapped, monkeypatch):
    choose(monkeypatch, wrapped)
    with Sandbox(TINY, LIMITS) as sandbox:
        given = {"clone": CLONE[os.uname().machine]}
        found = called(sandbox, "hidden_memory", **given)
    assert {str(way) for way, outcome in found.items() if str(outcome) == "done"} == {"fork"}


def test_what_another_user_leaves_where_all_can_write_is_removed():
    if os.geteuid() != 0:
        pytest.skip("needs root")
    user, claim = claim_user()
    with claim, tempfile.TemporaryDirectory(dir="/tmp") as mine:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        (folder / "file").touch()
        os.chown(folder, user, user)
        remove_files_of(user)
        assert not folder.exists() and Path(mine).exists()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((7, None, False), "bubblewrap, user 7, limits"),
        ((None, None, False), "bubblewrap, limits"),
        ((7, "why", True), "user 7, limits, no network; no bubblewrap .why., so .* all users can"),
        ((7, "why", False), "user 7, limits; .* all users can, to use the network"),
        ((None, "why", False), "limits; .* end what the grading user can, to use the network"),
    ],
)
def test_a_grade_says_which_defences_there_were_and_what_is_not_prevented(given, line):
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
        answer = called(sandbox, "echo", x=7)
    assert answer["x"] == 7 and sandbox.defences.startswith("limits; no bubblewrap")


def test_a_sandbox_that_does_not_start_is_no_students_fault(monkeypatch):
    monkeypatch.setattr("minidist.course.sandbox.supervisor.INSIDE", ROOT / "tests" / "nothing")
    message = r"does not start: .*can't find|does not start: .*open"
    with Sandbox(TINY, LIMITS) as sandbox, pytest.raises(RuntimeError, match=message):
        called(sandbox, "echo", x=7)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = '\0'", "null bytes"),
        ("(" * 5000, ""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
    ids="raises no_text too_deep interrupts".split(),
)
def test_files_of_one_task_that_cannot_be_imported_do_not_spoil_the_others(sandbox, bad, said):
    source = (PACKAGE / OTHER).read_text(encoding="utf-8")
    wrong = sandbox.put({GPIPE: bad, OTHER: source})
    assert wrong.keys() == {GPIPE} and said in wrong[GPIPE]
    assert (sandbox.tree / "minidist" / OTHER).read_text(encoding="utf-8") == source
    assert "Task 9.1" in (sandbox.tree / "minidist" / GPIPE).read_text(encoding="utf-8")


def test_the_copy_holds_nothing_compiled_and_of_the_labs_tests_what_runs_inside(sandbox):
    names = {path.name for path in sandbox.tree.rglob("*")}
    assert "gpipe.py" in names and not {"__pycache__", "tests", "mistakes"} & names
    course = sandbox.tree / "minidist" / "course"
    files = {path.relative_to(course).as_posix() for path in course.rglob("*") if path.is_file()}
    text = (course / "labs" / "tiny" / "tiny_tests.py").read_text(encoding="utf-8")
    assert "def order" in text and "def test_" not in text and "pytest" not in text
    assert files == {f"labs/{name}.py" for name in ("__init__", "ranks", "tiny/tiny_tests")}


def test_the_name_of_a_file_is_that_of_its_module():
    assert module_of("nn/linear.py") == "minidist.nn.linear"
    assert module_of("autograd/__init__.py") == "minidist.autograd"


def written(value) -> bytes:
    return json.dumps({"dict": [["answer", value]]}).encode() + b"\n"


def an_array(*content) -> dict:
    return {"array": content}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"[" * 100000,
        b"{}",
        b"7\n",
        b"\xff\xfe\n",
        b"PK\x03\x04" + bytes(100),
        b'{"dict": [["mistake", 1]]}\n',
        b'{"dict": [["answer", 1], ["error", ""]]}\n',
        written(an_array("<f8", [2])) + bytes(15),
        written(an_array("<U2", [])) + b"a\0\0\0" + b"\xff\xff\xff\x7f",  # no Unicode
        written(an_array(">U1", [2])) + b"\0\0\0a" + b"\0\x11\0\0",  # one above the last
        *(
            written(value) + bytes(64)
            for value in (
                an_array("<f8", [1 << 62]),
                an_array("<f8", [1 << 62, 1 << 62, 0, 4]),
                an_array("<f8", [-1]),
                an_array("<f8", [2.0]),
                an_array("<f8", [[2]]),
                an_array("|O", [1]),
                an_array("f4,f4", [1]),
                an_array("(2,)f4", [1]),
                an_array("M8[s]", [1]),
                an_array("V8", [1]),
                an_array("<c16", [1]),
                an_array("no type", [1]),
                an_array("<U2147483647", [1]),
                an_array("<f8", [1 << 62] * 10000),
                [an_array("<f8", [])] * 100000,
                an_array("f4," * 10000, [1]),
                an_array("<U0", [3]),
                an_array(None, []),
                an_array("x"),
                an_array("<i8", [10**12, 0]),
                {"dict": [[[], 1]], "array": []},
                {"dict": 7},
                {"object": "x"},
                ["x" * 1000] * 300,
            )
        ),
    ],
)
def test_a_forged_answer_is_a_text(tmp_path, content):
    (tmp_path / "0").write_bytes(content)
    begin = time.monotonic()
    assert read(tmp_path / "0") == "the answer is not what the sandbox writes"
    assert isinstance(read(tmp_path / "0"), NoAnswer) and time.monotonic() - begin < 2


def test_an_error_has_a_length_and_many_arrays_are_read_in_time(tmp_path):
    (tmp_path / "0").write_bytes(encode({"error": "x" * 10000}))
    assert read(tmp_path / "0") == "x" * 4000
    (tmp_path / "0").write_bytes(encode({"answer": [np.zeros(0)] * 8000}) + bytes(1 << 23))
    begin = time.monotonic()
    assert len(read(tmp_path / "0")) == 8000 and time.monotonic() - begin < 2


def test_an_answer_that_is_no_file_is_a_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(__file__)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder", "missing"):
        assert isinstance(read(tmp_path / name), NoAnswer)


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
print("begins", flush=True)
sys.exit(main(["lab", "grade", sys.argv[1], "--lab", "tiny"]))
"""


@linux
@pytest.mark.parametrize("wrapped", [WRAPPED, NOT_WRAPPED])
@pytest.mark.parametrize(
    "signal",
    [
        "SIGINT",
        "SIGKILL",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("SIGTERM", "SIGHUP")),
    ],
)
def test_a_grader_that_is_ended_leaves_no_process_and_none_but_a_killed_one_a_folder(
    signal, wrapped
):
    import signal as signals

    attack = Path(__file__).with_name("attacks") / "endless_loop"
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        grader = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, attack, place, str(wrapped)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with grader:
            grader.stdout.readline()
            until(lambda: len(supervised(place)) > 0)
            os.kill(grader.pid, getattr(signals, signal))
            grader.wait(timeout=20)
            until(lambda: supervised(place) == [])
            if signal != "SIGKILL":
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


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
