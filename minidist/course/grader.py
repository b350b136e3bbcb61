"""Grade a student's folder: ask each task's questions in a sandbox, and judge the answers here."""

import secrets
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.course.lab import Lab, Task, targets
from minidist.course.question import Question
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.sandbox.untrusted import contents, holder

LARGEST = 1 << 20  # bytes of a file that is handed in


@dataclass(frozen=True)
class Verdict:
    """The result of one task.

    wrong    a text per failed question: what was asked, and what is wrong with the answer
    output   what the student's code printed, shortened
    """

    task: Task
    questions: int
    wrong: list[str]
    output: str = ""
    seconds: float = 0.0

    passed = property(lambda self: not self.wrong)
    points = property(lambda self: self.task.points if self.passed else 0)


@dataclass(frozen=True)
class Grade:
    """The result of a lab.

    seed      the questions were drawn from it: the same seed gives the same questions
    defences  the defences of the sandbox that this machine had
    """

    lab: Lab
    verdicts: list[Verdict]
    seed: int
    defences: list[str]

    points = property(lambda self: sum(verdict.points for verdict in self.verdicts))


def questions(lab: Lab, task: Task, seed: int) -> list[Question]:
    """Return a task's questions, drawn from a seed."""
    return list(lab.questions.QUESTIONS[task.id](np.random.default_rng([seed, lab.number])))


def grade(
    folder: Path,
    lab: Lab,
    seed: int | None = None,
    limits: Limits = USUAL,
    without: tuple[str, ...] = (),
) -> Grade:
    """Ask and judge every task. Nothing that the student's code does raises here.

    folder   the submission; only the lab's own files in FOLDER/minidist/ are read
    seed     None draws an unpredictable one; the grade names it
    limits   time, memory, processes and files per task
    without  defences to leave out, see Sandbox

    ValueError if there is no FOLDER/minidist, see `handed_in`.
    """
    seed = secrets.randbits(32) if seed is None else seed
    files, unusable = handed_in(Path(folder), lab.files)
    with Sandbox(lab, limits, without) as sandbox:
        unusable |= sandbox.put(files)
        missing = {path for path in lab.files if path not in files and path not in unusable}
        verdicts = [_verdict(lab, task, seed, sandbox, unusable, missing) for task in lab.tasks]
        return Grade(lab, verdicts, seed, sandbox.defences)


def _verdict(lab, task, seed: int, sandbox: Sandbox, unusable: dict, missing: set) -> Verdict:
    asked, begin = questions(lab, task, seed), time.monotonic()
    paths = dict.fromkeys(path for path, _ in targets(task))
    wrong = [_said(path, unusable[path]) for path in paths if path in unusable]
    if wrong:
        return Verdict(task, len(asked), wrong)
    heard = sandbox.ask(asked)
    for question, answer in zip(asked, heard.answers, strict=True):
        said = answer if isinstance(answer, str) else judge(question, answer)
        if said is not None:
            wrong.append(_said(question.about, said))
    if wrong and (absent := [path for path in paths if path in missing]):
        wrong = [f"there is no minidist/{path}" for path in absent]
    return Verdict(task, len(asked), wrong, heard.output, time.monotonic() - begin)


def _said(about: str, said: str) -> str:
    said = said[:4000]
    return f"{about}:\n{textwrap.indent(said, '    ')}" if "\n" in said else f"{about}: {said}"


def judge(question: Question, answer: dict) -> str | None:
    """Return the verdict; an answer with an unexpected form is wrong, too."""
    floats = {name: a for name, a in answer.items() if np.asarray(a).dtype.kind in "fc"}
    nan = next((f"{name} has a NaN" for name, a in floats.items() if np.isnan(a).any()), None)
    try:
        with np.errstate(all="ignore"):
            return question.judge(answer) or nan
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return nan or f"the answer has not the form that was asked for ({why})"


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
