"""Grade a student's folder: ask every task's questions in a sandbox, and judge the answers here."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minidist.course.lab import Lab, Task
from minidist.course.question import Question
from minidist.course.sandbox import Sandbox


@dataclass(frozen=True)
class Verdict:
    """What became of one task; `wrong` has a line or more per question that failed."""

    task: Task
    questions: int
    wrong: list[str]
    output: str = ""

    passed = property(lambda self: not self.wrong)
    points = property(lambda self: self.task.points if self.passed else 0)


@dataclass(frozen=True)
class Grade:
    lab: Lab
    verdicts: list[Verdict] = field(default_factory=list)

    points = property(lambda self: sum(verdict.points for verdict in self.verdicts))


def questions(lab: Lab, task: Task, seed: int) -> list[Question]:
    """Return a task's questions, drawn from a seed."""
    return list(lab.questions.QUESTIONS[task.id](np.random.default_rng([seed, lab.number])))


def grade(folder: Path, lab: Lab, seed: int = 0) -> Grade:
    """Ask and judge every task. Nothing that the student's code does raises here."""
    files = {
        path: (folder / "minidist" / path).read_text()
        for path in lab.files
        if (folder / "minidist" / path).is_file()
    }
    verdicts = []
    with Sandbox(lab, files) as sandbox:
        for task in lab.tasks:
            asked = questions(lab, task, seed)
            heard = sandbox.ask(asked)
            wrong = []
            for question, answer in zip(asked, heard.answers, strict=True):
                said = answer if isinstance(answer, str) else judge(question, answer)
                if said is not None:
                    wrong.append(f"{question.about}: {said}")
            verdicts.append(Verdict(task, len(asked), wrong, heard.output))
    return Grade(lab, verdicts)


def judge(question: Question, answer: dict) -> str | None:
    """Return the verdict; an answer of another form than was asked for is wrong too."""
    try:
        return question.judge(answer)
    except Exception as error:
        return f"the answer has not the form that was asked for ({type(error).__name__}: {error})"
