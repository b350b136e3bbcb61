"""What the student's process can do, and what the grader reads of what it leaves."""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from minidist.course.overlay import PACKAGE
from minidist.course.question import Question
from minidist.course.sandbox import INSIDE, Sandbox, module
from minidist.course.sandbox.inside import seccomp
from minidist.course.sandbox.limits import LINUX, Limits
from minidist.course.sandbox.untrusted import read, remove
from tests.course.tiny import GPIPE, OTHER, TINY

ROOT = Path(__file__).parents[2]
LIMITS = Limits(seconds=20)
linux = pytest.mark.skipif(not LINUX, reason="needs Linux")


def ask(probe, given, **options):
    with Sandbox(TINY, LIMITS, **options) as sandbox:
        return sandbox.ask([Question("", probe, given)]).answers[0], sandbox.defences


slow = pytest.mark.slow


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
    (answer,) = sandbox.ask([Question("", "echo", given)]).answers
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
        ("nothing", "x should be an array of numbers, and is None: is a `return` missing?"),
        ("no dict", "AttributeError"),
        ("large", "more than 16 MB"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_what_is_no_answer_is_said_and_the_next_question_goes_on(sandbox, how, said):
    misused, answer = sandbox.ask(
        [Question("", "misuse", {"how": how}), Question("", "echo", {"x": 7})]
    ).answers
    assert said in misused and answer["x"] == 7


def test_ranks_that_are_threads_fit_the_limits(sandbox):
    (answer,) = sandbox.ask([Question("", "ranks", {"size": 8})]).answers
    assert np.array_equal(answer["sum"], np.full(1000, 8.0))


def test_the_students_process_finds_nothing_of_the_grader_around_it(sandbox):
    (found,) = sandbox.ask([Question("", "surroundings")]).answers
    assert not any("site-packages" in path for path in found["path"])
    assert str(ROOT) not in found["path"] and found["path"][0] == str(sandbox.tree)
    assert not any(name.startswith("PYTHON") for name in found["environment"])
    assert Path(str(found["folder"])).name == "scratch" and found["threads"] == 1
    assert found["descriptors"].tolist() == [0, 1, 2]
    assert found["course"].tolist() == [f"minidist.course.probes{name}" for name in ("", ".tiny")]
    limits = found["limits"].tolist()
    want = {0: 42, 1: 2 << 30, 2: 1 << 28, 3: 256, 4: 0}  # CPU, AS, FSIZE, NOFILE, CORE
    assert all(limits[k] == [most, most] for k, most in want.items())
    if LINUX:
        assert found["ends with the supervisor"] == 9 and limits[5][1] >= 256
    if LINUX and os.geteuid() == 0:
        assert limits[5] == [256, 256] and sandbox._folder.stat().st_mode & 0o777 == 0o750
        same = found["network"] == os.stat("/proc/self/ns/net").st_ino
        assert same != ("no network" in sandbox.defences)
        assert len(set(found["user"].tolist())) == 1 and found["user"][0] >= 61184


@linux
def test_the_kernel_refuses_what_the_students_code_does_not_need(sandbox):
    readable = [str(ROOT), str(PACKAGE), str(INSIDE), "/proc", "/home", "/", "/etc", "/tmp"]
    given = {"readable": readable, "writable": ["/tmp", "/dev/shm", str(sandbox.tree), str(ROOT)]}
    (found,) = sandbox.ask([Question("", "tries", given)]).answers
    done = {name for name, outcome in found.items() if outcome == "done"}
    have = " ".join(sandbox.defences)
    if "seccomp" not in have or "Landlock" not in have:
        pytest.skip(f"this kernel has not all of it: {have}")
    assert done == {"signal handler", "own limits", "own file", "nothing"}


@linux
@pytest.mark.parametrize("without", ["landlock", "seccomp", "user"])
def test_a_machine_that_lacks_a_defence_says_so_and_still_asks(without):
    answer, defences = ask("echo", {"x": 7}, without=(without,))
    assert answer["x"] == 7 and defences[-1] == "limits"
    assert not any(text.lower().startswith(without) for text in defences)


def test_a_sandbox_that_does_not_start_is_no_students_fault(monkeypatch):
    monkeypatch.setattr("minidist.course.sandbox.INSIDE", ROOT / "tests" / "nothing")
    with pytest.raises(RuntimeError, match=r"does not start: .*can't find|does not start: .*open"):
        ask("echo", {})


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


def test_the_copy_holds_nothing_compiled_and_of_the_course_this_labs_probes_alone(sandbox):
    names = {path.name for path in sandbox.tree.rglob("*")}
    assert "gpipe.py" in names and not {"__pycache__", "tests"} & names
    course = sandbox.tree / "minidist" / "course"
    files = {path.relative_to(course).as_posix() for path in course.rglob("*") if path.is_file()}
    assert files == {f"probes/{name}.py" for name in ("__init__", "ranks", "tiny")}


def test_the_name_of_a_file_is_that_of_its_module():
    assert module("nn/linear.py") == "minidist.nn.linear"
    assert module("autograd/__init__.py") == "minidist.autograd"


GOOD = [["x", "<f8", [2]]]


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
        json.dumps(GOOD).encode() + b"\n" + bytes(15),
        *(
            json.dumps(head).encode() + b"\n" + bytes(64)
            for head in (
                [["x", "<f8", [1 << 62]]],
                [["x", "<f8", [1 << 62, 1 << 62, 0, 4]]],
                [["x", "<f8", [-1]]],
                [["x", "<f8", [2.0]]],
                [["x", "<f8", [[2]]]],
                [["x", "|O", [1]]],
                [["x", "f4,f4", [1]]],
                [["x", "(2,)f4", [1]]],
                [["x", "M8[s]", [1]]],
                [["x", "V8", [1]]],
                [["x", "<c16", [1]]],
                [["x", "no type", [1]]],
                [["x", "<U2147483647", [1]]],
                [["x", "<f8", [1 << 62] * 10000]],
                [["x", "<f8", []]] * 100000,
                [["x", "f4," * 10000, [1]]],
                [["x", "<U0", [3]]],
                [["x", None, []]],
                [[None, "<f8", []], [["x"], "<f8", []]],
                [["x"]],
                "x",
                None,
                {"error": None, "x": 1},
                {"error": [[]]},
                {"mistake": ""},
            )
        ),
    ],
)
def test_a_forged_answer_is_a_text_or_harmless(tmp_path, content):
    (tmp_path / "0").write_bytes(content)
    begin = time.monotonic()
    assert isinstance(read(tmp_path / "0"), str)
    assert time.monotonic() - begin < 1


def test_errors_and_names_have_a_length(tmp_path):
    (tmp_path / "0").write_bytes(json.dumps({"error": "x" * 10000}).encode())
    assert read(tmp_path / "0") == "x" * 4000
    (tmp_path / "0").write_bytes(json.dumps([["x" * 1000, "<f8", [0]]] * 300).encode() + b"\n")
    assert read(tmp_path / "0") == "the answer is not what the sandbox writes"


def test_an_answer_that_is_no_file_is_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(__file__)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder", "missing"):
        assert read(tmp_path / name) is None


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


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_is_a_program_that_jumps_within_itself(machine):
    lines = np.frombuffer(seccomp.program(machine), "u2,u1,u1,u4")
    last = len(lines) - 1
    for number, (code, true, false, _) in enumerate(lines.tolist()):
        assert number + 1 + max(true, false) <= last or code == seccomp.RETURN
    assert lines[last].tolist()[0] == seccomp.RETURN and last < 200
    numbers = [pair[seccomp.MACHINES[machine][0]] for pair in seccomp.REFUSED.values()]
    numbers = [number for number in numbers if number is not None]
    assert len(set(numbers)) == len(numbers)


def test_all_that_minidist_imports_is_loaded_before_rights_are_given_up():
    """Where Python lies in a folder of root's, nothing can be imported later."""
    sys.path.insert(0, str(INSIDE))
    try:
        import student
    finally:
        sys.path.remove(str(INSIDE))
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n"
    code += "    try: importlib.import_module(name)\n    except ImportError: pass\n"
    names = [*student.MODULES, *student.NUMPY, *student.STANDARD]
    done = subprocess.run(
        [sys.executable, "-c", code + "print(*sys.modules)", *names], capture_output=True, text=True
    )
    needed = {name for path in PACKAGE.rglob("*.py") for name in imported(path)}
    assert needed - set(done.stdout.split()) == set()


def imported(path):
    """Yield the modules of the standard library and of NumPy that a file of minidist imports."""
    inside = path.relative_to(PACKAGE).parts
    if inside[:2] == ("course", "probes") or inside[0] not in ("course", "__main__.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            yield from (name for name in names if is_module(name))


def is_module(name):
    import importlib.util

    if name.split(".")[0] not in {"numpy", *sys.stdlib_module_names}:
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


INTERRUPTED = """
import sys, tempfile
from minidist.cli import main
from minidist.course import lab
from tests.course.tiny import TINY
tempfile.tempdir, lab.find = sys.argv[2], lambda name: TINY
print("begins", flush=True)
sys.exit(main(["lab", "grade", sys.argv[1], "--lab", "tiny"]))
"""


@linux
@pytest.mark.parametrize(
    "signal",
    [
        "SIGINT",
        "SIGKILL",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("SIGTERM", "SIGHUP")),
    ],
)
def test_a_grader_that_is_ended_leaves_no_process_and_none_but_a_killed_one_a_folder(signal):
    import signal as signals

    attack = Path(__file__).with_name("attacks") / "endless_loop"
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        grader = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, attack, place],
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
