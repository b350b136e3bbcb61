"""A question: what a student's code is asked, and what its answer must be."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Answer = dict[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """One call of a probe on the student's code, and the verdict on what it returns.

    about  what is asked, as a report shows it: "3 stages, 5 micro-batches"
    probe  a function of the lab's probes: (**given) -> {name: array}
    given  numbers, strings, arrays, and lists and dicts of them
    judge  answer -> None if it is right, else what is wrong: which rank, which number, and what
           was expected. It runs in the grader's process, where the student's code never runs.
    """

    about: str
    probe: str
    given: dict = field(default_factory=dict)
    judge: Callable[[Answer], str | None] = lambda answer: None


def expect(answer: Answer, want: dict[str, object]) -> str | None:
    """Compare an answer with what was expected: same names, shapes and exact values."""
    for name, value in want.items():
        value = np.asarray(value)
        if name not in answer:
            return f"{name} is missing"
        got = answer[name]
        if got.shape != value.shape:
            return f"{name} has the shape {list(got.shape)}, not {list(value.shape)}"
        if not np.array_equal(got, value):
            where = "" if not value.ndim else f" at {list(map(int, np.argwhere(got != value)[0]))}"
            first = tuple(np.argwhere(got != value)[0]) if value.ndim else ()
            return f"{name}{where} is {got[first]}, not {value[first]}"
    return None


def counted(n: int, what: str) -> str:
    """Return a number of things in correct English: "1 rank", "2 ranks", "3 batches"."""
    plural = "es" if what.endswith(("s", "ch")) else "s"
    return f"{n} {what}{plural * (n != 1)}"
