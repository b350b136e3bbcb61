"""Grade a student's folder: run the tests of its lab here, and what they call in a sandbox.

Where one fails, the register's mistakes are tested, too.
"""

import json
import secrets
import tempfile
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from minidist.course.lab import Lab, Task, shares
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.submissions import handed_in

NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class Verdict:
    """The result of one task.

    cases      how many tests there were
    wrong      a text per failed one: what was asked, and what is wrong with the answer
    output     what the student's code printed, shortened
    mistakes   the known mistakes that give the student's answers, in words
    groups     {a group of tests: whether all of them pass}
    score      the mean of its tests' scores, if they have some, and all are valid: lower is better
    """

    task: Task
    cases: int
    wrong: list[str]
    output: str = ""
    seconds: float = 0.0
    mistakes: tuple[str, ...] = ()
    groups: dict[str, bool] = field(default_factory=dict)
    score: float | None = None

    passed = property(lambda self: not self.wrong)
    begun = property(lambda self: self.wrong != [NOT_BEGUN])

    @property
    def points(self) -> int:
        """All of the task's, or the shares of the groups that are answered."""
        if self.passed:
            return self.task.points
        return sum(worth for group, worth in self.worth.items() if self.groups[group])

    @property
    def worth(self) -> dict[str, int]:
        """How many points each group of tests has."""
        if not self.groups:
            return {}
        points = shares(self.task.points, [1] * len(self.groups))
        return dict(zip(self.groups, points, strict=True))


@dataclass(frozen=True)
class Grade:
    """The result of a lab.

    seed      the tests' numbers were drawn from it
    defences  what the sandbox had on this machine, and what is therefore not prevented
    remark    that the folder was made for another student
    junit     pytest's own report, as XML
    """

    lab: Lab
    verdicts: list[Verdict]
    seed: int
    defences: str
    remark: str = ""
    junit: str = ""

    points = property(lambda self: sum(verdict.points for verdict in self.verdicts))

    @property
    def score(self) -> float | None:
        """The mean of the tasks' scores, for the leaderboard; None if a task has none."""
        found = [verdict.score for verdict in self.verdicts if verdict.score is not None]
        return mean(found) if 0 < len(found) == len(self.verdicts) else None


def grade(
    folder: Path, lab: Lab, seed: int | None = None, limits: Limits = USUAL, task: str | None = None
) -> Grade:
    """Test every task, or one. Nothing that the student's code does raises here.

    folder  the submission; only the lab's own files in FOLDER/minidist/ are read
    seed    None draws an unpredictable one; the grade names it
    limits  time, memory, processes and files per task
    task    its id, if only one is to be judged

    ValueError if there is no such task, or no FOLDER/minidist, see `handed_in`.
    """
    tasks = lab.tasks if task is None else [lab.task(task)]
    seed = secrets.randbits(32) if seed is None else seed
    files, unusable = handed_in(folder, lab.files)
    with Sandbox(lab, limits) as sandbox:
        unusable |= sandbox.put(files)
        verdicts, junit = _tested(tasks, seed, sandbox, files, unusable)
        tested = replace(lab, tasks=tasks)
        return Grade(tested, verdicts, seed, sandbox.defences, junit=junit)


def _tested(
    tasks: list[Task], seed: int, sandbox: Sandbox, files: dict[str, str], unusable: dict[str, str]
) -> tuple[list[Verdict], str]:
    """Return the verdicts of some tasks' tests on a student's files, and pytest's own XML."""
    from minidist.course import diagnosis, grading  # which need pytest

    lab = sandbox.lab
    assert lab is not None
    run = grading.Grading(lab, tasks, seed, sandbox)
    refused: dict[str, list[str]] = {}
    for task in tasks:
        paths = list(dict.fromkeys(path for path, _ in task.targets))
        refused[task.id] = [_about(path, unusable[path]) for path in paths if path in unusable]
        if untouched(task, files):
            refused[task.id].append(NOT_BEGUN)
        elif absent := [path for path in paths if path not in files and path not in unusable]:
            refused[task.id] += [f"there is no minidist/{path}" for path in absent]
    run.refused = {id: "\n".join(why) for id, why in refused.items() if why}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        options = f"--junitxml={file}", "--override-ini=junit_family=xunit1"  # has properties
        cases, verdicts = grading.run(run, *options), []
        junit = file.read_text(encoding="utf-8")
    for task in tasks:
        own = [case for case in cases if case.task.id == task.id]
        wrong = [_about(case.about, case.wrong) for case in own if case.wrong]
        groups = {case.group: True for case in own}
        groups |= {case.group: False for case in own if case.wrong}
        mistakes: tuple[str, ...] = ()
        if why := refused[task.id]:
            wrong, groups = why, {}
        elif wrong:
            mistakes = diagnosis.mistakes_like(own, sandbox, task, seed)
        scores = [case.score for case in own if case.scored]
        score = round(mean(filter(None, scores)), 4) if scores and all(scores) else None
        seconds, printed = sum(case.seconds for case in own), run.printed.get(task.id, "")
        more = printed, seconds, mistakes, groups, score
        verdicts.append(Verdict(task, len(own), wrong, *more))
    return verdicts, junit


def untouched(task: Task, files: dict[str, str]) -> bool:
    """Return whether all that a task blanks out is handed in as the starter has it."""
    paths = [path for path, _ in task.targets]
    stub = f"raise NotImplementedError({json.dumps(task.stub)})"
    return all(files.get(path, "").count(stub) >= paths.count(path) for path in paths)


def _about(what: str, message: str) -> str:
    """Return a message under what it is about: in its line, or below it."""
    message = message[:4000]
    if "\n" in message:
        return f"{what}:\n{textwrap.indent(message, '    ')}"
    return f"{what}: {message}"
