"""Recognise known mistakes in a student's answers: test those of the register, compare the numbers.

This happens only where a test fails, in a sandbox of its own, in half a second per mistake, and
once for all submissions with the same numbers. So a mistake of the register needs no code that
recognises it.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace

from minidist.course import grading
from minidist.course.answers import flat, near
from minidist.course.grading import Case
from minidist.course.lab import Lab, Task
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.untrusted import NoAnswer
from minidist.verify.mistakes.register import Mistake, mistakes, source

MOST = 256  # tests of mistakes that are kept: those of one seed for all labs
_tested: dict[tuple, list[Case]] = {}


def mistakes_like(cases: list[Case], student: Sandbox, task: Task, seed: int) -> tuple[str, ...]:
    """Return the words of the mistakes whose answers are the student's, or of another's variant.

    cases  the tests of the task, of which some failed

    No new mistake is tried after the time limit of one task.
    """
    unwritten = ("NotImplementedError", "no answer: ", "not asked any more")
    texts = [answer for case in cases for answer in case.answers if isinstance(answer, NoAnswer)]
    if any(word in text for text in texts for word in unwritten):
        return ()
    end, lab = time.monotonic() + student.limits.seconds, student.lab
    assert lab is not None
    with Sandbox(lab, student.limits) as sandbox:

        def answers_so(mistake: Mistake) -> bool:
            if time.monotonic() > end:
                return False
            key = mistake.edits, task.id, seed, lab.student
            if key not in _tested:
                sandbox.build({path: source(path) for path in sandbox.files} | mistake.files())
                if len(_tested) >= MOST:
                    _tested.clear()
                _tested[key] = grading.run(grading.Grading(lab, [task], seed, sandbox))
            return all(map(same_case, cases, _tested[key]))

        copied = [variant.says for variant in others(lab, task) if answers_so(variant)]
        return tuple(copied or [made.says for made in mistakes_of(lab, task) if answers_so(made)])


def others(lab: Lab, task: Task) -> Iterator[Mistake]:
    """Yield the package's own version of a task and other students', with this student's others."""
    if task.variant is None:
        return
    rest = [edit for own in lab.variants if own != task.variant for edit in own.edits]
    yours = f"yours: {task.variant.says}"
    yield Mistake("package", tuple(rest), says=f"it is the package's own version; {yours}")
    for variant in task.variants:
        if variant != task.variant:
            says = f"it is another student's version: {variant.says}; {yours}"
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


def error_of(answer) -> str:
    """Return the last line of a traceback, which names the error; without the time of a wait."""
    last = answer.rstrip().rpartition("\n")[2] if isinstance(answer, NoAnswer) else ""
    return re.sub(r"since [\d.]+ s", "", last)


def same_case(case: Case, mistaken: Case) -> bool:
    """Return whether a test passes for both, or fails for both with the same answers."""
    if not case.wrong or not mistaken.wrong:
        return bool(case.wrong) == bool(mistaken.wrong)
    both = zip(case.answers, mistaken.answers, strict=False)
    return len(case.answers) == len(mistaken.answers) and all(same(*pair) for pair in both)


def same(answer, mistaken) -> bool:
    """Return whether two answers are equal: numbers up to rounding, errors by their last line."""
    if isinstance(answer, NoAnswer) or isinstance(mistaken, NoAnswer):
        return error_of(answer) == error_of(mistaken)
    try:
        a, b = flat(answer), flat(mistaken)
    except (AssertionError, RecursionError):  # numbers too large, lists too deep
        return False
    return a.keys() == b.keys() and all(near(a[name], b[name]) for name in a)
