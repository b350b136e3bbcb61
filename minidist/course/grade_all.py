"""Grade all that a class has handed in, side by side. What is done is kept, and not done again.

A worker is a process that grades one submission after the other. If it hangs or ends, this costs
the submission that it was at, and another worker takes its place.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import isfinite
from multiprocessing.connection import wait
from pathlib import Path

from minidist.course import grader, property_lab, report, similarity
from minidist.course.lab import Lab
from minidist.course.sandbox.limits import USUAL, Limits, open_to_all
from minidist.course.sandbox.untrusted import plain, remove
from minidist.course.submissions import check_no_link, handed_in, label, submissions
from minidist.errors import WrongInput, is_wrong_input

ENDING = 20  # seconds that a worker has to clean up
SPAWN = multiprocessing.get_context("spawn")  # a new process inherits nothing from its elders


@dataclass
class Result:
    """What became of one submission.

    name     of its folder or .zip
    key      of its files, seed and limits; "" if the next run is to grade it again
    points   {task's id: points}; empty if it could not be graded
    causes   {task's id: a known mistake, or what else is wrong}, of tasks that are not solved
    score    for the leaderboard, if the lab has one and the answers are valid
    student  whose version of the lab it is, if it was made for one
    why      why it could not be graded
    """

    name: str
    lab: str
    seed: int
    key: str = ""
    minutes: float = 0.0
    points: dict[str, int] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    score: float | None = None
    student: str = ""
    why: str = ""

    sum = property(lambda self: sum(self.points.values()))


@dataclass(frozen=True)
class Job:
    """What all submissions have in common.

    results   the folder that gets for each NAME.json, NAME.txt (for the student), NAME.xml (JUnit)
    patience  seconds after which one is given up
    students  the class; None: whoever lab.txt names, or nobody
    """

    lab: Lab
    seed: int
    results: Path
    patience: float
    limits: Limits = USUAL
    students: frozenset[str] | None = None


def place(results: Path, path: Path) -> Path:
    """Return the file that gets a submission's result; a long name is cut, and ends in a hash."""
    name = os.fsencode(path.name)
    if len(name) > 240:
        name = name[:220] + hashlib.sha256(name).hexdigest()[:16].encode()
    return results / (os.fsdecode(name) + ".json")


def grade_all(paths: list[Path], job: Job, jobs: int, done: Callable[[Result], None]) -> None:
    """Grade submissions by `jobs` processes; save each result, then call `done` with it."""
    scratch = Path(tempfile.mkdtemp(prefix="minidist-grade-all-", dir=open_to_all()))
    scratch.chmod(0o755)  # the users that students' code runs as enter the folders in it
    waiting = list(paths)
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                busy.append(idle.pop() if idle else _Worker(job, scratch))
                busy[-1].begin(waiting.pop(0))
            latest = max(0.0, min(worker.until for worker in busy) - time.monotonic())
            ready = wait([worker.pipe for worker in busy], latest)
            for worker in list(busy):
                if worker.pipe in ready or time.monotonic() > worker.until:
                    result = worker.result(worker.pipe in ready)
                    busy.remove(worker)
                    idle += [] if worker.pipe.closed else [worker]
                    save(result, place(job.results, worker.path))
                    done(result)
    finally:
        for worker in idle + busy:
            worker.process.terminate()
        for worker in idle + busy:
            worker.end()
        with contextlib.suppress(OSError):  # a worker was killed, and its sandbox is ending
            remove(scratch)


class _Worker:
    def __init__(self, job: Job, scratch: Path):
        self.job, (self.pipe, inner) = job, SPAWN.Pipe()
        self.process = SPAWN.Process(target=_work, args=(inner, job, scratch))
        self.process.start()
        inner.close()

    def begin(self, path: Path) -> None:
        self.path, self.until = path, time.monotonic() + self.job.patience
        with contextlib.suppress(OSError):  # it has ended: its result will say so
            self.pipe.send(path)

    def result(self, ready: bool) -> Result:
        why = f"the grader was not done in {self.job.patience:g} s"
        if ready:
            with contextlib.suppress(EOFError, OSError):
                return self.pipe.recv()
            why = "the grader's process ended"
        self.end()
        return Result(plain(self.path.name), self.job.lab.name, self.job.seed, why=why)

    def end(self) -> None:
        self.process.terminate()
        self.process.join(ENDING)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe, job: Job, scratch: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by an exception, so that it cleans up
    tempfile.tempdir = str(scratch)
    with contextlib.suppress(EOFError, OSError):  # the first process has ended
        while True:
            pipe.send(_graded(pipe.recv(), job))


def _graded(path: Path, job: Job) -> Result:
    begin, result = time.monotonic(), Result(plain(path.name), job.lab.name, job.seed)
    files = job.lab.files or [property_lab.FILE]
    grade = grader.grade if job.lab.files else property_lab.grade
    try:
        check_no_link(path)
        said, student = label(path)
        if said and said != job.lab.name:
            raise WrongInput(f"it is for lab {said}, not for {job.lab.name}")
        lab = job.lab.for_student(student)
        result.student = lab.student
        if job.students is not None and lab.student not in job.students:
            raise WrongInput(f"its student is {lab.student!r}, who is not in the class")
        words = repr([lab.name, lab.student, job.seed, job.limits, handed_in(path, files)])
        key = hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()
        if (kept := load(place(job.results, path))) and kept.key == key:
            return kept
        found = grade(path, lab, job.seed, job.limits)
        file = place(job.results, path)
        file.with_suffix(".xml").write_text(report.junit(found), encoding="utf-8")
        file.with_suffix(".txt").write_text(report.text(found, foot=False), encoding="utf-8")
        result.key = key
        result.score = found.score
        result.points = {verdict.task.id: verdict.points for verdict in found.verdicts}
        result.causes = {v.task.id: report.cause(v) for v in found.verdicts if not v.passed}
    except Exception as error:  # of any kind: the others are to be graded
        kind = "" if is_wrong_input(error) else f"{type(error).__name__}: "
        result.why = " ".join(plain(f"{kind}{error}", lines=True).split())[:500]
    result.minutes = round((time.monotonic() - begin) / 60, 3)
    return result


def save(result: Result, file: Path) -> None:
    """Write a result as JSON: all of it, or nothing if this is interrupted."""
    half = file.with_name("unfinished")
    half.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    half.replace(file)


def load(file: Path) -> Result | None:
    """Read a result; None if there is none, or if it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        found = Result(**json.loads(file.read_text(encoding="utf-8")))
        texts = [found.name, found.lab, found.key, found.student, found.why]
        texts += [text for pair in found.causes.items() for text in pair]
        numbers = [found.minutes, found.score or 0.0, *found.points.values()]
        whole = all(type(text) is str for text in texts) and type(found.seed) is int
        return found if whole and all(map(isfinite, numbers)) else None
    return None


def earlier_results(
    folder: Path, results: Path | None = None
) -> tuple[list[Path], Path, dict[Path, Result]]:
    """Return a class's submissions, the folder of results, and those that it has, newest last."""
    if not (paths := submissions(folder)):
        raise WrongInput(f"{folder} has no submissions: a folder or .zip for each student")
    whole_path = folder.resolve()
    results = results or whole_path.with_name(f"{whole_path.name}.results")
    files = {path: file for path in paths if (file := place(results, path)).is_file()}
    in_time = sorted(files, key=lambda path: files[path].stat().st_mtime_ns)
    return paths, results, {path: done for path in in_time if (done := load(files[path]))}


def compared(paths: list[Path], lab: Lab) -> tuple[dict[str, float], dict[tuple, float]]:
    """Return the submissions' shares of the package and of each other, see `similarity.shared`."""
    files = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # its row says why it was not graded
            check_no_link(path)
            files[plain(path.name)] = handed_in(path, lab.files)[0]
    return similarity.shared({name: own for name, own in files.items() if own}, lab)
