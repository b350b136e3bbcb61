"""Grade a student's folder: ask each task's questions in a sandbox, and judge the answers here.

The right answers are the package's own. Where one is wrong, the register's mistakes are asked, too.
"""

import secrets
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.course.diagnosis import known_mistakes
from minidist.course.lab import Lab, Task, targets
from minidist.course.question import Question, judge
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.sandbox.untrusted import contents, holder

LARGEST = 1 << 20  # bytes of a file that is handed in


@dataclass(frozen=True)
class Verdict:
    """The result of one task.

    wrong     a text per failed question: what was asked, and what is wrong with the answer
    mistakes  the known mistakes that give the student's answers, in words
    output    what the student's code printed, shortened
    """

    task: Task
    questions: int
    wrong: list[str]
    output: str = ""
    seconds: float = 0.0
    mistakes: tuple[str, ...] = ()

    passed = property(lambda self: not self.wrong)
    points = property(lambda self: self.task.points if self.passed else 0)


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
) -> Grade:
    """Ask and judge every task. Nothing that the student's code does raises here.

    folder   the submission; only the lab's own files in FOLDER/minidist/ are read
    seed     None draws an unpredictable one; the grade names it
    limits   time, memory, processes and files per task
    wrapped  whether bubblewrap is used where it works

    ValueError if there is no FOLDER/minidist, see `handed_in`.
    """
    seed = secrets.randbits(32) if seed is None else seed
    files, unusable = handed_in(Path(folder), lab.files)
    with Sandbox(lab, limits, wrapped) as sandbox:
        unusable |= sandbox.put(files)
        missing = {path for path in lab.files if path not in files and path not in unusable}
        verdicts = [_verdict(lab, task, seed, sandbox, unusable, missing) for task in lab.tasks]
        return Grade(lab, verdicts, seed, sandbox.defences)


def _verdict(lab, task, seed: int, sandbox: Sandbox, unusable: dict, missing: set) -> Verdict:
    asked, begin = questions(lab, task, seed), time.monotonic()
    paths = dict.fromkeys(path for path, _ in targets(task))
    wrong = [_about(path, unusable[path]) for path in paths if path in unusable]
    if wrong:
        return Verdict(task, len(asked), wrong)
    heard = sandbox.ask(asked)
    messages = [judge(q, answer) for q, answer in zip(asked, heard.answers, strict=True)]
    wrong = [_about(q.about, m) for q, m in zip(asked, messages, strict=True) if m]
    seconds = time.monotonic() - begin
    mistakes: tuple[str, ...] = ()
    if wrong and (absent := [path for path in paths if path in missing]):
        wrong = [f"there is no minidist/{path}" for path in absent]
    elif wrong:
        mistakes = known_mistakes(sandbox, task, asked, heard.answers, messages)
    return Verdict(task, len(asked), wrong, heard.output, seconds, mistakes)


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
