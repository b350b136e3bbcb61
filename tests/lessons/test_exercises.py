"""The checks of exercises accept every valid answer, and refuse all others in words."""

import ast
import linecache
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from lessons import support
from lessons.support import exercise
from minidist import Cluster
from minidist.nn.router import route
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward
from tests.lessons.pages import LESSONS


def square(x):
    return x * x


def double(x):
    return 2 * x


def open_stub(x):
    raise NotImplementedError


def refuses(x):
    raise ValueError(f"{x} of 4")


def check(attempt):
    return None if attempt(3) == 9 else f"3 squared is not {attempt(3)}"


def of_lesson(name: str):
    return exercise.exercise_of(name).check


@pytest.mark.grid(8)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_a_worked_solution_is_solved_and_tempting_answers_and_nonsense_are_refused(lesson):
    for number in (1, 2, 3):
        each = exercise.exercise_of(f"{lesson.number}.{number}")
        assert len(each.tempting) >= 1 and len(each.hints) == 3
        assert all(isinstance(hint, str) and len(hint) > 10 for hint in each.hints)
        exercise.refuse(each)
        for nonsense in (None, lambda *_: np.ones(2)):
            verdict = exercise.verdict(each.check, nonsense)
            assert verdict.startswith("wrong: "), (each, nonsense, verdict)


def test_a_verdict_is_one_of_three_here_and_on_ranks():
    with Cluster(2, transport="thread") as cluster:
        for judged in (check, partial(on_ranks, cluster, check)):
            verdicts = [exercise.verdict(judged, one) for one in (square, open_stub, double)]
            assert verdicts == ["solved", "not solved yet", "wrong: 3 squared is not 6"]
            said = exercise.verdict(judged, refuses)
            assert said == 'wrong: 3 of 4, in its line 2: `raise ValueError(f"{x} of 4")`'

        def waits(attempt):
            cluster.run(lambda group: group.recv(1 - group.rank))

        assert exercise.verdict(waits, square).startswith("wrong: Deadlock: every rank waits")


def on_ranks(cluster, check, attempt):
    return cluster.run(lambda group: check(attempt))[0]


def inner(x):
    def inside():
        return [][x]

    return inside()


def endless(x):
    return endless(x + 1)


def leaves(x):
    sys.exit("enough")


CRASHES = [  # an attempt, what it raises, in which of its lines, and the code there
    (partial(inner), "IndexError: list index out of range", 3, "return [][x]"),
    (lambda x: x // 0, "ZeroDivisionError: ", 1, "lambda x: x //"),
    (lambda x: np.ones(x) + np.ones(4), "ValueError: operands could not", 1, "np.ones(x) + np.o"),
    (endless, "RecursionError: maximum recursion depth", 2, "return endless(x + 1)"),
    (leaves, "SystemExit: enough", 2, 'sys.exit("enough")'),
]


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_every_error_of_an_attempt_is_wrong_and_shows_its_line_also_of_a_notebook(
    transport, monkeypatch
):
    """The source of a cell is in no file; IPython puts it where tracebacks find it."""
    source, name = "k = None\n\ndef add(n):\n    n = n + 1\n    return n + k\n", "<cell 7>"
    entry = len(source), None, source.splitlines(keepends=True), name
    monkeypatch.setitem(linecache.cache, name, entry)
    exec(compile(source, name, "exec"), cell := {})
    crashes = [*CRASHES, (cell["add"], "TypeError: unsupported", 3, "return n + k")]
    with Cluster(2, transport=transport) as cluster:
        for attempt, raised, line, code in crashes:
            for judged, rank in (check, ""), (partial(on_ranks, cluster, check), r"on rank \d "):
                said = exercise.verdict(judged, attempt)
                assert re.match(f"wrong: {rank}your function raises {re.escape(raised)}", said)
                assert code in said.split(f", in its line {line}: `")[1], said


def test_ctrl_c_ends_the_lesson():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exercise.verdict(check, interrupted)


def test_a_value_that_the_check_cannot_use_and_an_error_of_the_check_are_said():
    for value in (None, [1, 2], "text"):
        said = exercise.verdict(check, value)
        assert said.startswith(f"wrong: the check of your answer {value!r} raises TypeError: ")

    def length(attempt):
        return None if len(attempt(3)) == 9 else "not 9"

    said = exercise.verdict(length, square)
    assert said.startswith("wrong: the check raises TypeError: object of type 'int' has no len()")
    assert said.endswith("it cannot use what your function makes")


def test_a_solution_must_be_solved_and_a_tempting_answer_refused_on_purpose():
    exercise.refuse(exercise.Exercise(check, square, (), [double, refuses]))
    for solution, tempting, words in [
        (square, [square], "lets square pass"),
        (double, [], "the worked solution is wrong: 3 squared is not 6"),
        (square, [lambda x: x // 0], r"the check has no words for .*: wrong: "),
    ]:
        with pytest.raises(AssertionError, match=words):
            exercise.refuse(exercise.Exercise(check, solution, (), tempting))


def test_an_exercise_is_found_by_its_name_and_its_hints_are_counted(capsys):
    exercise.judge("14.1", open_stub)
    exercise.hint("14.1", 2)
    shown = capsys.readouterr().out
    assert shown.startswith("exercise 14.1: not solved yet\nexercise 14.1, hint 2 of 3: ")
    with pytest.raises(ValueError, match=r"no exercise 99.1; lesson 99 has none"):
        exercise.judge("99.1", open_stub)


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
    needed = ast.unparse(support.exercise_alone(LESSON, "1")).splitlines()
    assert needed[:2] == ["from support import begin, exercise", "N = 2"]
    assert needed[-1] == "exercise.judge('14.1', answer)"
    assert not any("idle" in line or "never" in line or "numpy" in line for line in needed)


@pytest.mark.slow
@pytest.mark.grid(10)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_an_exercise_runs_alone(lesson, number):
    command = [sys.executable, lesson.path, "--exercise", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"exercise {lesson.number}.{number}: not solved yet\n", done.stderr


def weights_last(rank, p, m, inputs=reversed, weights=reversed):
    yield from map(Forward, range(m))
    yield from map(BackwardInput, inputs(range(m)))
    yield from map(BackwardWeight, weights(range(m)))


def one_forward_one_backward_first(rank, p, m):
    own = programs("1f1b", p, m)[rank]
    backwards = [a.micro_batch for a in own if isinstance(a, Backward)]
    yield from (BackwardInput(a.micro_batch) if isinstance(a, Backward) else a for a in own)
    yield from map(BackwardWeight, backwards)


def a_weight_early(rank, p, m):
    own = list(weights_last(rank, p, m))
    yield from [*own[: m + 1], own[2 * m], *own[m + 1 : 2 * m], *own[2 * m + 1 :]]


def one_at_a_time(rank, p, m):
    for i in range(m):
        yield from (Forward(i), BackwardInput(i))
    yield from map(BackwardWeight, range(m))


def test_lesson_7_accepts_any_order_whose_weights_come_last_and_no_other():
    for inputs in (iter, reversed):
        for weights in (iter, reversed):
            attempt = partial(weights_last, inputs=inputs, weights=weights)
            assert of_lesson("07.2")(attempt) is None
    assert of_lesson("07.2")(one_forward_one_backward_first) is None
    for attempt, words in [
        (a_weight_early, "not every W is at the end"),
        (lambda *given: list(weights_last(*given))[:-1], "missing: W"),
        (lambda rank, p, m: programs("gpipe", p, m)[rank], "both halves at once"),
        (one_at_a_time, "who waits for what"),
    ]:
        assert words in exercise.verdict(of_lesson("07.2"), attempt)


def late_start(rank, p, m):
    """As many in flight as in 1F1B, but only of the last p micro-batches."""
    early = max(0, m - p)
    for i in range(early):
        yield from (Forward(i), Backward(i))
    for action in programs("1f1b", p, m - early)[rank]:
        yield type(action)(action.micro_batch + early)


def test_lesson_8_accepts_any_order_with_the_stash_and_the_time_of_1f1b():
    judged = of_lesson("08.1")
    newest_first = lambda rank, p, m: [  # noqa: E731
        type(a)(m - 1 - a.micro_batch) for a in programs("1f1b", p, m)[rank]
    ]
    assert judged(newest_first) is None
    assert "the stash is" in judged(lambda rank, p, m: programs("gpipe", p, m)[rank])
    assert "units, not" in judged(late_start)


def test_lesson_15_states_all_bytes_of_its_third_exercise_and_accepts_lists_in_its_first():
    """The task names what a count takes; rows and counts together are what a rank sends."""
    (lesson,) = [each for each in LESSONS if each.number == "15"]
    assert "8 bytes" in " ".join(lesson.prose.split("## Exercise 3")[1].split("\n## ")[0].split())

    def sends(rows, C, r):
        N, E = rows.shape
        pairs = rows.reshape(N, N, E // N).sum(axis=2)  # [from, to]
        away = pairs[r].sum() + pairs[:, r].sum() - 2 * pairs[r, r]
        return 2 * 4 * C * away + 8 * (N - 1) * (E // N)

    assert of_lesson("15.3")(sends) is None
    lists = lambda chosen, capacity: route(chosen, 4, capacity).kept.tolist()  # noqa: E731
    assert of_lesson("15.1")(lists) is None
