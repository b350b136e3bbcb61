"""A program on real ranks behind the pages: what it finds, and that nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from minidist.course.sandbox.untrusted import remove
from minidist.observe.pages.real_run import RealRun
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.text import as_text
from tests.comm.test_cluster import gone, group_gone
from tests.test_killed import below

ROOT = Path(__file__).parents[2]
TWO = as_text(programs("1f1b", 2, 4))
LONG = as_text(programs("1f1b", 2, 150))  # its seven steps take many seconds
slow = pytest.mark.slow


def until(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def ended(run):
    """Return the status of a run that has ended."""
    until(lambda: run.status["state"] != "running", 100)
    return run.status


@pytest.fixture
def place():
    """A folder for temporary files whose name is short: a socket's is at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    folder.chmod(0o755)  # the sandbox's user enters it
    yield folder
    for entry in folder.iterdir():
        remove(entry)
    folder.rmdir()


@pytest.fixture
def started(place, monkeypatch):
    """started(text) -> a run; at the end no process and no file of any run may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    runs = []

    def start(text, seconds=100):
        runs.append(RealRun(text, seconds))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()
        assert group_gone(run.process.pid)
    assert list(place.iterdir()) == []


def measuring(run):
    """Wait until the ranks of a run compute; return all its processes."""
    until(lambda: "steps" in run.status["progress"] or run.status["state"] != "running")
    assert run.status["state"] == "running", run.status
    until(lambda: len(below(run.process.pid)) >= 4)  # fork server, tracker, two ranks
    return [run.process.pid, *below(run.process.pid)]


def test_a_program_is_certified_measured_and_simulated_on_as_many_processes_as_it_has_ranks(
    started,
):
    status = ended(started(TWO))
    assert status["state"] == "done" and status["fraction"] == 1.0, status
    certificate = status["certificate"]
    assert certificate["ok"] and certificate["words"].startswith("On 2 processes every parameter")
    assert all(row["ok"] and row["ranks"] == 2 for row in certificate["rows"])
    assert len(certificate["rows"]) == 5
    want = [[str(action) for action in program] for program in programs("1f1b", 2, 4)]
    for name in ("measured", "simulated"):
        timeline = status[name]
        assert [[cell["name"] for cell in row] for row in timeline["rows"]] == want
        for cell in (cell for row in timeline["rows"] for cell in row):
            assert 0 <= cell["start"] < cell["end"] and cell["kind"] == cell["name"][0]
        last = max(row[-1]["end"] for row in timeline["rows"])
        assert last == pytest.approx(timeline["makespan"], rel=1e-9) or name == "measured"
    ratio = status["measured"]["makespan"] / status["simulated"]["makespan"]
    assert status["ratio"] == pytest.approx(ratio)
    json.dumps(status, allow_nan=False)


def test_a_program_that_is_wrong_or_too_large_starts_no_process(monkeypatch):
    monkeypatch.setattr("minidist.observe.pages.real_run.Popen", None)
    for text, words in [
        (as_text(programs("1f1b", 9, 9)), "9 ranks are too many to run here; use at most 8"),
        (as_text(programs("interleaved", 8, 8, 9)), "72 stages are too many"),
        (as_text(programs("1f1b", 2, 1300)), "5,200 actions are too many"),
        ("rank 0  F0 F1 B1", "missing: B"),
        (__file__, "line 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            RealRun(text)


def test_a_run_that_is_cancelled_leaves_nothing(started):
    run = started(LONG)
    pids = measuring(run)
    run.stop()
    assert run.status["state"] == "cancelled" and run.status["certificate"]["ok"]
    assert gone(pids)
    run.stop()  # again: nothing happens
    assert run.status["state"] == "cancelled"
    started(LONG).stop()  # at once


def test_a_run_that_takes_too_long_is_ended_and_says_so(started):
    run = started(LONG, seconds=1)
    assert ended(run)["state"] == "failed"
    assert "took too long; use fewer" in run.status["error"]


@pytest.mark.parametrize("whom", [pytest.param("process", marks=slow), "rank"])
def test_a_run_that_is_killed_fails_with_a_sentence_and_leaves_nothing(started, whom):
    run = started(LONG)
    pids = measuring(run)
    os.kill(pids[0] if whom == "process" else pids[-1], signal.SIGKILL)
    assert ended(run)["state"] == "failed"
    words = {"process": "the run was ended from outside", "rank": "the run failed: "}[whom]
    assert words in run.status["error"]
    assert gone(pids)


@pytest.fixture
def explore(place):
    """Give `minidist explore`, and a function that asks it."""
    command = [sys.executable, "-m", "minidist", "explore"]
    environment = os.environ | {"TMPDIR": str(place)}
    options = {"cwd": ROOT, "env": environment, "text": True}
    # Whoever runs the tests under nohup has it ignored, and `explore` respects that.
    options["preexec_fn"] = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **options, **pipes) as process:
        address, token = process.stdout.readline().strip().split("/?token=")

        def ask(kind, **question):
            headers = {"Content-Type": "application/json", "X-Token": token}
            data = json.dumps(question).encode()
            with urlopen(Request(f"{address}/{kind}", data, headers), timeout=60) as answer:
                return json.load(answer)

        yield process, ask
        process.kill()


def running(ask, text):
    """Start a run; return its number once its ranks compute."""
    number = ask("run", text=text)["run"]
    until(lambda: (s := ask("status", run=number))["fraction"] == 0.5 or s["state"] != "running")
    status = ask("status", run=number)
    assert status["state"] == "running", status
    return number


@pytest.mark.parametrize(
    "number, status",
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=slow),
        pytest.param(signal.SIGHUP, 129, marks=slow),
        pytest.param(signal.SIGKILL, -9, marks=slow),
    ],
)
def test_a_server_that_ends_in_the_middle_leaves_nothing(explore, place, number, status):
    process, ask = explore
    ask("answer", page="schedules", python="def program(rank, p, m): return 'F0 B0'", p=1, m=1)
    running(ask, LONG)
    until(lambda: len(below(process.pid)) >= 7)  # the run's five, bubblewrap, the supervisor
    pids = [process.pid, *below(process.pid)]
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(timeout=30) == status
    assert gone(pids)
    assert process.stderr.read() == ""
    left = "minidist-lab-*" if number == signal.SIGKILL else ""  # as a grader that is killed
    until(lambda: all(left and path.match(left) for path in place.iterdir()))


def test_one_run_at_a_time_and_a_cancelled_one_makes_room(explore):
    _, ask = explore
    first = running(ask, LONG)
    assert "another run has not ended" in ask("run", text=TWO)["error"]
    assert ask("cancel", run=first)["state"] == "cancelled"
    second = ask("run", text=TWO)["run"]
    assert "not known any more" in ask("status", run=first)["error"]
    assert "not known any more" in ask("cancel", run=None)["error"]
    assert ask("cancel", run=second)["state"] == "cancelled"
    assert "error" in ask("run", text="rank 0 F0 B0 B0") and "error" in ask("run", text=[7])
