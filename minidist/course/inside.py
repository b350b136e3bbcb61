"""What a lab's tests are made of: `task`, and `inside`, where a student's code runs.

    @inside
    def reduced(arrays):               # calls the student's functions, where there is a student
        return on_ranks(...)           # by value: numbers, texts, arrays, lists and dictionaries

    @task("2.3")
    def test_the_ring_sums(rng):       # never sees the student's objects
        arrays = [rng.standard_normal(5) for _ in range(3)]
        for x in reduced(arrays):
            np.testing.assert_allclose(x, sum(arrays))

In the repository's own tests `inside` is a plain call, and the lab a test of the package. A grader
sets ASK: then the function is called in a sandbox, where the part of the file that it reaches
(`part_inside` in blank.py) is all that there is of the tests. If a student has variants of tasks,
it sets VARIANTS: the package answers with their edits.
"""

import pickle
from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any

from minidist.course.answers import check
from minidist.course.sandbox.inside.values import decode, encode
from minidist.verify.mistakes.register import Mistake, planted

Ask = Callable[["Inside", tuple, dict], Any]
ASK: ContextVar[Ask | None] = ContextVar("ask", default=None)
VARIANTS: ContextVar[tuple[Mistake, ...]] = ContextVar("variants", default=())


class Inside:
    """A function that runs where the student's files are; see `inside`."""

    def __init__(self, function: Callable, any_form: bool):
        update_wrapper(self, function)
        self.function, self.any_form = function, any_form
        self._latest: tuple[object, bytes] = None, b""  # what the package was asked, and gave

    def __call__(self, *arguments, **named) -> Any:
        ask = ASK.get()
        return ask(self, arguments, named) if ask else self.package(*arguments, **named)

    def package(self, *arguments, **named) -> Any:
        """Return the package's value; the same call again costs nothing."""
        asked = pickle.dumps((arguments, named)), VARIANTS.get()
        if self._latest[0] != asked:
            with planted(*VARIANTS.get()):
                self._latest = asked, self.by_value(*asked[:1])
        return decode(self._latest[1])

    def by_value(self, pickled: bytes) -> bytes:
        """Return the value of a call, encoded, whose arguments are pickled."""
        arguments, named = pickle.loads(pickled)
        return encode(self.function(*arguments, **named))

    def check(self, *arguments, **named) -> None:
        """Call it; raise AssertionError if its value is not the package's, up to rounding."""
        check(self(*arguments, **named), self.package(*arguments, **named))


def inside(function: Callable | None = None, *, any_form: bool = False) -> Any:
    """Decorate a function that calls the student's code, and returns a value: see values.py.

    any_form  a test judges the form of the value; else it has the package's: the same names, and
              arrays of as many dimensions
    """
    if function is None:
        return lambda function: Inside(function, any_form)
    return Inside(function, any_form)


def task(id: str) -> Any:
    """Mark a test as one of a task's. The tests of a task share its points equally."""
    import pytest  # which is not in the sandbox

    return pytest.mark.task(id)
