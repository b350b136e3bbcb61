"""Grade a student's folder: ask each task's questions in a sandbox, and judge the answers here.

The right answers are the package's own. Where one is wrong, the register's mistakes are asked, too.
"""

import json
import secrets
import textwrap
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import numpy as np

from minidist.course.diagnosis import known_mistakes
from minidist.course.lab import Lab, Task, shares
from minidist.course.question import Question, judge, score
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.submissions import handed_in

NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class Verdict:
    """The result of one task.

    questions  how many there were
    wrong      a text per failed question: what was asked, and what is wrong with the answer
    output     what the student's code printed, shortened
    mistakes   the known mistakes that give the student's answers, in words
    groups     {a group of questions: whether all of them are answered}
    score      of all its questions that have one, if their answers are valid: lower is better
    """

    task: Task
    questions: int
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
        """How many points each group of questions has."""
        if not self.groups:
            return {}
        points = shares(self.task.points, [1] * len(self.groups))
        return dict(zip(self.groups, points, strict=True))


@dataclass(frozen=True)
class Grade:
    """The result of a lab.

    seed      the questions were drawn from it: the same seed gives the same questions
    defences  what the sandbox had on this machine, and what is therefore not prevented
    remark    that the folder was made for another student
    """

    lab: Lab
    verdicts: list[Verdict]
    seed: int
    defences: str
    remark: str = ""

    points = property(lambda self: sum(verdict.points for verdict in self.verdicts))

    @property
    def score(self) -> float | None:
        """The mean of the tasks' scores, for the leaderboard; None if a task has none."""
        found = [verdict.score for verdict in self.verdicts if verdict.score is not None]
        return mean(found) if 0 < len(found) == len(self.verdicts) else None


def questions(lab: Lab, task: Task, seed: int) -> list[Question]:
    """Return a task's questions, drawn from a seed; for a variant, only its own answer is right."""
    asked = lab.questions.QUESTIONS[task.id](np.random.default_rng([seed, lab.number]))
    found = [replace(question, variants=lab.variants) for question in asked]
    return [question.exactly() for question in found] if task.variant else found


def grade(
    folder: Path, lab: Lab, seed: int | None = None, limits: Limits = USUAL, task: str | None = None
) -> Grade:
    """Ask and judge every task, or one. Nothing that the student's code does raises here.

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
        verdicts = [_verdict(each, seed, sandbox, files, unusable) for each in tasks]
        return Grade(replace(lab, tasks=tasks), verdicts, seed, sandbox.defences)


def _verdict(
    task: Task, seed: int, sandbox: Sandbox, files: dict[str, str], unusable: dict[str, str]
) -> Verdict:
    assert sandbox.lab is not None
    asked, begin = questions(sandbox.lab, task, seed), time.monotonic()
    paths = list(dict.fromkeys(path for path, _ in task.targets))
    if wrong := [_about(path, unusable[path]) for path in paths if path in unusable]:
        return Verdict(task, len(asked), wrong)
    if untouched(task, files):
        return Verdict(task, len(asked), [NOT_BEGUN])
    heard = sandbox.ask(asked)
    messages = [judge(q, answer) for q, answer in zip(asked, heard.answers, strict=True)]
    wrong = [_about(q.about, m) for q, m in zip(asked, messages, strict=True) if m]
    seconds = time.monotonic() - begin
    mistakes: tuple[str, ...] = ()
    groups = {q.group: True for q in asked}
    groups |= {q.group: False for q, message in zip(asked, messages, strict=True) if message}
    if wrong and (absent := [path for path in paths if path not in files]):
        wrong, groups = [f"there is no minidist/{path}" for path in absent], {}
    elif wrong:
        mistakes = known_mistakes(sandbox, task, asked, heard.answers, messages)
    worth = score(asked, heard.answers)
    return Verdict(task, len(asked), wrong, heard.output, seconds, mistakes, groups, worth)


def untouched(task: Task, files: dict[str, str]) -> bool:
    """Return whether all that a task blanks out is handed in as the starter has it."""
    paths = [path for path, _ in task.targets]
    stub = f"raise NotImplementedError({json.dumps(task.stub)})"
    return all(files.get(path, "").count(stub) >= paths.count(path) for path in paths)


def _about(what: str, message: str) -> str:
    """Return what is wrong with something: in its line, or below it."""
    message = message[:4000]
    if "\n" in message:
        return f"{what}:\n{textwrap.indent(message, '    ')}"
    return f"{what}: {message}"
