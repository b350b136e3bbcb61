"""Grade a student's folder: ask each task's questions in a sandbox, and judge the answers here.

The right answers are the package's own. Where one is wrong, the register's mistakes are asked, too.
"""

import json
import secrets
import textwrap
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from minidist.course.diagnosis import known_mistakes
from minidist.course.lab import Lab, Task, shares
from minidist.course.question import Question, judge
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.sandbox.untrusted import contents, holder

LARGEST = 1 << 20  # bytes of a file that is handed in
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class Verdict:
    """The result of one task.

    questions  how many there were
    wrong      a text per failed question: what was asked, and what is wrong with the answer
    output     what the student's code printed, shortened
    mistakes   the known mistakes that give the student's answers, in words
    groups     {a group of questions: whether all of them are answered}
    """

    task: Task
    questions: int
    wrong: list[str]
    output: str = ""
    seconds: float = 0.0
    mistakes: tuple[str, ...] = ()
    groups: dict[str, bool] = field(default_factory=dict)

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
    """

    lab: Lab
    verdicts: list[Verdict]
    seed: int
    defences: str

    points = property(lambda self: sum(verdict.points for verdict in self.verdicts))


def questions(lab: Lab, task: Task, seed: int) -> list[Question]:
    """Return a task's questions, drawn from a seed."""
    return list(lab.questions.QUESTIONS[task.id](np.random.default_rng([seed, lab.number])))


def grade(
    folder: Path,
    lab: Lab,
    seed: int | None = None,
    limits: Limits = USUAL,
    wrapped: bool = True,
    task: str | None = None,
) -> Grade:
    """Ask and judge every task, or one. Nothing that the student's code does raises here.

    folder   the submission; only the lab's own files in FOLDER/minidist/ are read
    seed     None draws an unpredictable one; the grade names it
    limits   time, memory, processes and files per task
    wrapped  whether bubblewrap is used where it works
    task     its id, if only one is to be judged

    ValueError if there is no such task, or no FOLDER/minidist, see `handed_in`.
    """
    tasks = lab.tasks if task is None else [lab.task(task)]
    seed = secrets.randbits(32) if seed is None else seed
    files, unusable = handed_in(Path(folder), lab.files)
    with Sandbox(lab, limits, wrapped) as sandbox:
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
    return Verdict(task, len(asked), wrong, heard.output, seconds, mistakes, groups)


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


def handed_in(folder: Path, paths: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return {path: source} of a lab's files, and {path: why} of those that cannot be used.

    A missing file is in neither. ValueError if there is no minidist/ in `folder`, nor in its only
    subfolder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if (root := holder(folder, "minidist", Path.is_dir)) is None:
        wanted = ", ".join(f"minidist/{path}" for path in paths)
        raise ValueError(f"{folder} has no folder minidist; hand in {wanted}, in these folders")
    found, unusable = {}, {}
    for path in paths:
        try:
            found[path] = _source(root.resolve(), root / "minidist" / path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RuntimeError) as error:
            unusable[path] = str(error)
    return found, unusable


def _source(root: Path, path: Path) -> str:
    """Read a file that is in `root`, and is a regular file."""
    if not path.resolve(strict=True).is_relative_to(root):
        raise ValueError("it is a link that leads out of the folder")
    text = contents(path.resolve(), LARGEST)
    if text is None:
        raise ValueError("it is not a regular file, or it cannot be read")
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
