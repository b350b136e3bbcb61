"""Recognise known mistakes in a student's answers: run those of the register, compare the numbers.

This happens only where an answer is wrong, in a sandbox of its own, in half a second per mistake,
and once for all submissions that are asked the same. So a mistake of the register needs no code
that recognises it.
"""

import pickle
import re
import time

from minidist.course.answers import Answer, near
from minidist.course.lab import Task
from minidist.course.question import Question, judge
from minidist.course.sandbox import Sandbox
from minidist.mistakes.register import Mistake, mistakes, source

Answers = list[Answer | str]
MOST = 256  # answers of mistakes that are kept: those of one seed for all labs
_answered: dict[tuple[str, bytes], Answers] = {}


def known_mistakes(
    student: Sandbox,
    task: Task,
    asked: list[Question],
    answers: Answers,
    messages: list[str | None],
) -> tuple[str, ...]:
    """Return the words of the task's mistakes whose answers are the student's.

    student   the sandbox that was asked: the other one has its lab and limits
    messages  what is wrong with each answer, or None

    No new mistake is tried after the time limit of one task.
    """
    unwritten = ("NotImplementedError", "no answer: ", "not asked any more")
    if any(isinstance(each, str) and word in each for each in answers for word in unwritten):
        return ()
    end = time.monotonic() + student.limits.seconds
    found = []
    with Sandbox(student.lab, student.limits, student.wrapped) as sandbox:
        for mistake in mistakes().values():
            if mistake.task != task.id or time.monotonic() > end:
                continue
            theirs = answers_of(mistake, sandbox, asked)
            if all(map(recognised, asked, answers, messages, theirs)):
                found.append(mistake.says)
    return tuple(found)


def answers_of(mistake: Mistake, sandbox: Sandbox, asked: list[Question]) -> Answers:
    """Return what the package with one mistake answers; the same questions are asked once."""
    key = mistake.name, pickle.dumps([(q.probe.__name__, q.given) for q in asked])
    if key not in _answered:
        files = {path: source(path) for path in sandbox.files}
        sandbox.build(files | mistake.files())
        if len(_answered) >= MOST:
            _answered.clear()
        _answered[key] = sandbox.ask(asked).answers
    return _answered[key]


def recognised(
    question: Question, answer: Answer | str, message: str | None, mistaken: Answer | str
) -> bool:
    """Return whether a mistake answers as the student: the right answer, or the numbers."""
    if message is None:
        return judge(question, mistaken) is None
    if isinstance(answer, str) or isinstance(mistaken, str):
        return error_of(answer) == error_of(mistaken)
    same_names = answer.keys() == mistaken.keys()
    return same_names and all(near(answer[name], mistaken[name]) for name in answer)


def error_of(answer: Answer | str) -> str:
    """Return the last line of a traceback, which names the error; without the time of a wait."""
    last = answer.rstrip().rpartition("\n")[2] if isinstance(answer, str) else ""
    return re.sub(r"since [\d.]+ s", "", last)
