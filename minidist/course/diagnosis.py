"""Recognise known mistakes in a student's answers: run those of the register, compare the numbers.

This happens only where an answer is wrong, in a sandbox of its own, in half a second per mistake,
and once for all submissions that are asked the same. So a mistake of the register needs no code
that recognises it.
"""

import contextlib
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import replace

from minidist.course.answers import Answer, near
from minidist.course.lab import Lab, Task
from minidist.course.question import Question, judge
from minidist.course.sandbox import Sandbox
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.register import Mistake, mistakes, source

Answers = list[Answer | str]
MOST = 256  # answers of mistakes that are kept: those of one seed for all labs
_answered: dict[tuple[tuple[Edit, ...], bytes], Answers] = {}


def known_mistakes(
    student: Sandbox,
    task: Task,
    asked: list[Question],
    answers: Answers,
    messages: list[str | None],
) -> tuple[str, ...]:
    """Return the words of the mistakes whose answers are the student's, or of another's variant.

    student   the sandbox that was asked: the other one has its lab and limits
    messages  what is wrong with each answer, or None

    No new mistake is tried after the time limit of one task.
    """
    unwritten = ("NotImplementedError", "no answer: ", "not asked any more")
    if any(isinstance(each, str) and word in each for each in answers for word in unwritten):
        return ()
    end = time.monotonic() + student.limits.seconds
    lab = student.lab
    assert lab is not None
    with Sandbox(lab, student.limits) as sandbox:

        def answers_so(mistake: Mistake) -> bool:
            if time.monotonic() > end:
                return False
            theirs = answers_of(mistake, sandbox, asked)
            return all(map(recognised, asked, answers, messages, theirs))

        copied = [variant.says for variant in others(lab, task) if answers_so(variant)]
        return tuple(copied or [made.says for made in mistakes_of(lab, task) if answers_so(made)])


def others(lab: Lab, task: Task) -> Iterator[Mistake]:
    """Yield other students' variants of a task, in the package with this student's other ones."""
    if task.variant is None:
        return
    rest = [edit for own in lab.variants if own != task.variant for edit in own.edits]
    for variant in task.variants:
        if variant != task.variant:
            says = f"it is another student's version: {variant.says}; yours: {task.variant.says}"
            yield replace(variant, says=says, edits=(*rest, *variant.edits))


def mistakes_of(lab: Lab, task: Task) -> Iterator[Mistake]:
    """Yield a task's mistakes, in the package with the student's variants, if they apply to it."""
    own = [edit for variant in lab.variants for edit in variant.edits]
    for mistake in mistakes().values():
        if mistake.task == task.id:
            made = replace(mistake, edits=(*own, *mistake.edits))
            with contextlib.suppress(ValueError) if own else contextlib.nullcontext():
                made.files()
                yield made


def answers_of(mistake: Mistake, sandbox: Sandbox, asked: list[Question]) -> Answers:
    """Return what the package with one mistake answers; the same questions are asked once."""
    key = mistake.edits, pickle.dumps([(q.probe.__name__, q.given) for q in asked])
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
