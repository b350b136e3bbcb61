"""A question: what a student's code is asked, and what its answer must be."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Answer = dict[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """One call of a probe beside the student's code, and the verdict on what it returns.

    about  what is tried, as a report says it: "3 stages, 5 micro-batches"
    probe  a function of the lab's probes: (**given) -> {name: array}
    given  numbers, strings, arrays, and lists and dicts of them
    judge  answer -> None if it is right, else what is wrong: which rank, which number, and what
           was expected. It is called beside the reference, where the student's code never is.
    """

    about: str
    probe: str
    given: dict = field(default_factory=dict)
    judge: Callable[[Answer], str | None] = lambda answer: None


def expect(answer: Answer, want: dict[str, object]) -> str | None:
    """Compare an answer with what was expected: same names, shapes and, exactly, values."""
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
    """Return a number of things as English has it: "1 rank", "2 ranks", "3 batches"."""
    plural = "es" if what.endswith(("s", "ch")) else "s"
    return f"{n} {what}{plural * (n != 1)}"
