"""What a lesson says of an attempt at its exercise."""

import ast
import asyncio
import contextlib
import linecache
import re
import sys
from functools import partial

import numpy as np
import pytest

from lessons import support
from lessons.support import exercise
from minidist import Cluster


def square(x):
    return x * x


def double(x):
    return 2 * x


def open_stub(x):
    raise NotImplementedError


def check(attempt):
    return None if attempt(3) == 9 else f"3 squared is not {attempt(3)}"


def test_a_verdict_is_one_of_three():
    verdicts = [exercise.verdict(check, attempt) for attempt in (square, open_stub, double)]
    assert verdicts == ["solved", "not solved yet", "wrong: 3 squared is not 6"]


def refuses(x):
    raise ValueError(f"{x} of 4")


def test_a_value_error_says_what_is_wrong_here_and_on_ranks():
    with Cluster(2, transport="thread") as cluster:
        here = exercise.verdict(check, refuses)
        there = exercise.verdict(lambda attempt: cluster.run(lambda group: attempt(3)), refuses)
    assert here == there == 'wrong: 3 of 4, in its line 2: `raise ValueError(f"{x} of 4")`'

    def own_words(attempt):
        raise ValueError("the check's words")

    assert exercise.verdict(own_words, square) == "wrong: the check's words"


def wrong_type(x):
    """Two lines above."""
    text = "three"
    return text + x


class Shape:
    def __init__(self, side):
        self.side = side

    @property
    def area(self):
        return self.sides**2


def inner(x):
    def inside():
        return [][x]

    return inside()


def endless(x):
    return endless(x + 1)


def gives_up(x):
    raise asyncio.CancelledError("enough")


def leaves(x):
    sys.exit("enough")


CRASHES = [  # an attempt, what it raises, in which of its lines, and the code there
    (wrong_type, "TypeError: can only concatenate", 4, "return text + x"),
    (partial(wrong_type), "TypeError: can only concatenate", 4, "return text + x"),
    (
        lambda x: x // 0,
        "ZeroDivisionError: ",  # Python 3.14 has other words
        1,
        "lambda x: x //",
    ),
    (lambda x: {}[x], "KeyError: 3", 1, "lambda x: {}[x]"),
    (lambda x: np.ones(x) + np.ones(4), "ValueError: operands could not", 1, "np.ones(x) + np.o"),
    (lambda x: x.y, "AttributeError: 'int' object has no attribute 'y'", 1, "lambda x: x.y"),
    (inner, "IndexError: list index out of range", 3, "return [][x]"),
    (endless, "RecursionError: maximum recursion depth", 2, "return endless(x + 1)"),
    (leaves, "SystemExit: enough", 2, 'sys.exit("enough")'),
    (gives_up, "asyncio.exceptions.CancelledError: enough", 2, 'CancelledError("enough")'),
]


def test_ctrl_c_ends_the_lesson():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercise.verdict(check, interrupted)


def of_class(attempt):
    return None if attempt(3).area == 9 else "not 9"


@pytest.mark.parametrize("transport", ["here", "thread", "process"])
def test_every_error_of_an_attempt_is_wrong_and_shows_its_line(transport):
    with contextlib.ExitStack() as stack:
        if transport != "here":
            stack.enter_context(cluster := Cluster(2, transport=transport))

        def asked(check):
            return check if transport == "here" else partial(on_ranks, cluster, check)

        for attempt, raised, line, source in CRASHES:
            said = exercise.verdict(asked(check), attempt)
            rank = "" if transport == "here" else r"on rank \d "
            assert re.match(f"wrong: {rank}your function raises {re.escape(raised)}", said), said
            assert source in said.split(f", in its line {line}: `")[1], said
        said = exercise.verdict(asked(of_class), Shape)
        assert "your class raises AttributeError: 'Shape' object has no attribute 'sides'" in said
        assert said.endswith("in its line 3: `return self.sides**2`")


def on_ranks(cluster, check, attempt):
    return cluster.run(lambda group: check(attempt))[0]


@pytest.mark.parametrize("value", [None, 3, [1, 2], np.ones(2), "text"])
def test_a_value_that_the_check_cannot_use_is_shown(value):
    said = exercise.verdict(check, value)
    start = f"wrong: the check of your answer {value!r} raises TypeError: "
    assert said.startswith(start) and said.endswith("object is not callable")


def test_an_error_of_the_check_does_not_name_a_line_of_the_attempt():
    """It cannot go on with what the attempt returns."""

    def length(attempt):
        return None if len(attempt(3)) == 9 else "not 9"

    said = exercise.verdict(length, square)
    assert said.startswith("wrong: the check raises TypeError: object of type 'int' has no len()")
    assert said.endswith("it cannot use what your function makes")


def test_an_attempt_of_a_notebook_cell_shows_its_line(monkeypatch):
    """Its source is in no file; IPython puts it where tracebacks find it."""
    source, name = "k = None\n\ndef add(n):\n    n = n + 1\n    return n + k\n", "<cell 7>"
    entry = len(source), None, source.splitlines(keepends=True), name
    monkeypatch.setitem(linecache.cache, name, entry)
    exec(compile(source, name, "exec"), cell := {})
    said = exercise.verdict(check, cell["add"])
    assert said.endswith("in its line 3: `return n + k`"), said
    with Cluster(2, transport="process") as cluster:
        said = exercise.verdict(partial(on_ranks, cluster, check), cell["add"])
    assert said.endswith("in its line 3: `return n + k`"), said


@pytest.mark.parametrize("accident", [lambda x: x // 0, lambda x: np.ones(x) + np.ones(4), None])
def test_a_tempting_answer_is_not_refused_by_accident(accident):
    with pytest.raises(AssertionError, match=r"the check has no words for .*: wrong: "):
        exercise.refuse(exercise.Exercise(check, square, (), [accident]))
    exercise.refuse(exercise.Exercise(check, square, (), [refuses]))


def test_a_stub_on_ranks_is_not_solved_yet_and_another_error_is_wrong():
    with Cluster(2, transport="thread") as cluster:

        def on_ranks(attempt):
            found = cluster.run(lambda group: attempt(group.rank))
            return None if found == [0, 1] else f"ranks return {found}"

        assert exercise.verdict(on_ranks, open_stub) == "not solved yet"
        assert exercise.verdict(on_ranks, lambda rank: [][rank]).startswith("wrong: on rank ")
        assert exercise.verdict(on_ranks, square) == "solved"

        def waits(attempt):
            cluster.run(lambda group: group.recv(1 - group.rank))

        assert exercise.verdict(waits, square).startswith("wrong: Deadlock: every rank waits")


def test_the_solution_must_be_solved_and_tempting_answers_refused():
    exercise.refuse(exercise.Exercise(check, square, (), [double]))
    with pytest.raises(AssertionError, match="lets square pass"):
        exercise.refuse(exercise.Exercise(check, square, (), [square]))
    with pytest.raises(AssertionError, match="the worked solution is wrong: 3 squared is not 6"):
        exercise.refuse(exercise.Exercise(check, double, (), []))


def test_an_exercise_is_found_by_its_name_and_its_hints_are_counted(capsys):
    exercise.judge("14.1", open_stub)
    exercise.hint("14.1", 2)
    shown = capsys.readouterr().out
    assert shown.startswith("exercise 14.1: not solved yet\nexercise 14.1, hint 2 of 3: ")
    with pytest.raises(ValueError, match=r"no exercise 14.4; lesson 14 has 1, 2, 3"):
        exercise.judge("14.4", open_stub)
    with pytest.raises(ValueError, match=r"no exercise 99.1; lesson 99 has none"):
        exercise.judge("99.1", open_stub)
    with pytest.raises(ValueError, match="hints 1 to 3, not 0"):
        exercise.hint("14.1", 0)


LESSON = """
import numpy as np
from support import begin, exercise
begin()
print("never")
N = 2
def idle(): return np.zeros(N)
def base(x):
    return x * N
def answer(x):
    return base(x)
exercise.judge("14.1", answer)
exercise.judge("14.2", idle)
"""


def test_one_exercise_runs_only_what_binds_its_names():
    needed = ast.unparse(support.exercise_alone(LESSON, "1"))
    assert needed.splitlines() == [
        "from support import begin, exercise",
        "N = 2",
        "",
        "def base(x):",
        "    return x * N",
        "",
        "def answer(x):",
        "    return base(x)",
        "exercise.judge('14.1', answer)",
    ]
    with pytest.raises(ValueError, match="no exercise 3; choose one of 1, 2"):
        support.exercise_alone(LESSON, "3")
