"""A question: what a student's code is asked, and how its answer is judged.

The right answer is the package's own: the grader runs the same probe on the package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean

import numpy as np

from minidist.course.answers import Answer, like_the_package
from minidist.verify.mistakes.register import Mistake, planted

MUCH = 100  # times as many numbers as the package's answer has

Judge = Callable[[Answer, Answer], str | None]
Random = np.random.Generator


@dataclass(frozen=True)
class Question:
    """One call of a probe on the student's code, and the verdict on what it returns.

    about  what is asked, as a report shows it: "3 stages, 5 micro-batches"
    probe  a function of the lab's probes: (**given) -> {name: array}
    given  numbers, strings, arrays, and lists and dicts of them
    judge  (answer, the package's answer) -> None if the answer is right, else what is wrong: which
           rank, which number, and what was expected. It runs in the grader's process, where the
           student's code never runs.
    group  the case that it tests, as "uneven parts": a task's points are shared by its groups, and
           a group earns its share if all of its questions are answered
    score  (answer) -> how good it is, for a leaderboard: lower is better; ValueError: not valid
    variants  the student's variants of the lab's tasks: the package answers with their edits
    """

    about: str
    probe: Callable[..., dict]
    given: dict
    judge: Judge
    group: str = ""
    score: Callable[[Answer], float] | None = None
    variants: tuple[Mistake, ...] = ()

    @cached_property
    def right(self) -> Answer:
        """The package's answer."""
        with planted(*self.variants):
            return {name: np.asarray(value) for name, value in self.probe(**self.given).items()}

    def exactly(self) -> "Question":
        """Return it with a judge that takes no other answer than the package's."""
        if getattr(self.judge, "func", self.judge) is like_the_package:
            return self
        return replace(self, judge=lambda a, want: self.judge(a, want) or like_the_package(a, want))


Questions = Iterator[Question]


def ask(
    about: str,
    probe: Callable[..., dict],
    judge: Judge = like_the_package,
    /,
    group: str = "",
    **given,
) -> Question:
    """Return a question; by default its answer must be what the package answers."""
    return Question(about, probe, given, judge, group)


def ints(rng: Random, low: int, high: int, count: int) -> list[int]:
    """Draw whole numbers from low to high - 1."""
    return [int(n) for n in rng.integers(low, high, count)]


def ranks(N: int) -> str:
    """Return the group of a question to N ranks; one rank alone is often right without work."""
    return "any number of ranks" if N > 2 else "one or two ranks"


def judge(question: Question, answer: Answer | str) -> str | None:
    """Return what is wrong: a text in place of an answer, a form that was not asked for, a NaN."""
    if isinstance(answer, str):
        return answer
    want = question.right  # an error here is the package's, not the answer's
    if too_large(question, answer):
        return f"the answer has {size_of(answer)} numbers, the package's {size_of(want)}"
    floats = {name: a for name, a in answer.items() if a.dtype.kind == "f"}
    nan = next((f"{name} has a NaN" for name, a in floats.items() if np.isnan(a).any()), None)
    try:
        with np.errstate(all="ignore"):
            return question.judge(answer, want) or nan
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return nan or f"the answer has not the form that was asked for ({why})"


def score(asked: list[Question], answers: list[Answer | str]) -> float | None:
    """Return the mean over the questions that have a score; None if one has no valid answer."""
    rows = [(q, q.score, a) for q, a in zip(asked, answers, strict=True) if q.score]
    try:
        found = [f(a) for q, f, a in rows if not isinstance(a, str) and not too_large(q, a)]
    except Exception:  # of any kind, as in `judge`
        return None
    return round(mean(found), 4) if rows and len(found) == len(rows) else None


def too_large(question: Question, answer: Answer) -> bool:
    """Return whether an answer is so large that its judge would take minutes."""
    return size_of(answer) > MUCH * (MUCH + size_of(question.right))


def size_of(answer: Answer) -> int:
    return sum(array.size for array in answer.values())
