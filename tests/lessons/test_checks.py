"""The checks of exercises accept every valid answer, and refuse all others in words."""

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from lessons.support import exercise
from minidist.nn.router import route
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward
from tests.lessons.pages import LESSONS

EXERCISES = [f"{lesson.number}.{number}" for lesson in LESSONS for number in (1, 2, 3)]


def check(name: str):
    return exercise.exercise_of(name).check


@pytest.mark.parametrize("name", EXERCISES)
def test_the_worked_solution_is_solved_and_tempting_answers_are_refused(name):
    each = exercise.exercise_of(name)
    assert len(each.tempting) >= 1 and len(each.hints) == 3
    assert all(isinstance(hint, str) and len(hint) > 10 for hint in each.hints)
    exercise.refuse(each)


@pytest.mark.parametrize("name", EXERCISES)
def test_nonsense_is_not_solved_and_does_not_stop_the_lesson(name):
    nonsense = (None, 3, lambda *_: None, lambda *_: "text", lambda *_: np.ones(2), lambda: None)
    for answer in nonsense:
        said = exercise.verdict(check(name), answer)
        assert said.startswith("wrong: "), (answer, said)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.stem)
def test_an_exercise_runs_alone(lesson):
    for number in (1, 2, 3):
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


@pytest.mark.parametrize("inputs", [iter, reversed])
@pytest.mark.parametrize("weights", [iter, reversed])
def test_lesson_7_accepts_halves_of_backward_in_any_order(inputs, weights):
    attempt = partial(weights_last, inputs=inputs, weights=weights)
    assert check("07.2")(attempt) is None


def test_lesson_7_accepts_another_schedule_whose_weights_come_last():
    assert check("07.2")(one_forward_one_backward_first) is None


def a_weight_early(rank, p, m):
    own = list(weights_last(rank, p, m))
    yield from [*own[: m + 1], own[2 * m], *own[m + 1 : 2 * m], *own[2 * m + 1 :]]


def a_weight_forgotten(rank, p, m):
    yield from list(weights_last(rank, p, m))[:-1]


def backward_in_one(rank, p, m):
    yield from programs("gpipe", p, m)[rank]


def one_at_a_time(rank, p, m):
    for i in range(m):
        yield from (Forward(i), BackwardInput(i))
    yield from map(BackwardWeight, range(m))


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (a_weight_early, "not every W is at the end"),
        (a_weight_forgotten, "missing: W"),
        (backward_in_one, "both halves at once"),
        (one_at_a_time, "who waits for what"),
    ],
)
def test_lesson_7_refuses_what_is_not_asked_for(attempt, words):
    assert words in exercise.verdict(check("07.2"), attempt)


def newest_first(rank, p, m):
    return [type(a)(m - 1 - a.micro_batch) for a in programs("1f1b", p, m)[rank]]


def late_start(rank, p, m):
    """As many in flight as in 1F1B, but only of the last p micro-batches."""
    early = max(0, m - p)
    for i in range(early):
        yield from (Forward(i), Backward(i))
    for action in programs("1f1b", p, m - early)[rank]:
        yield type(action)(action.micro_batch + early)


def test_lesson_8_accepts_any_order_with_the_stash_and_the_time_of_1f1b():
    judged = check("08.1")
    assert judged(lambda rank, p, m: programs("1f1b", p, m)[rank]) is None
    assert judged(newest_first) is None
    assert "the stash is" in judged(lambda rank, p, m: programs("gpipe", p, m)[rank])
    assert "units, not" in judged(late_start)


def task(number: str, exercise: int) -> str:
    """Return the words of an exercise, without line breaks."""
    (lesson,) = [each for each in LESSONS if each.number == number]
    part = lesson.prose.split(f"## Exercise {exercise}")[1].split("\n## ")[0]
    return " ".join(part.split())


def test_lesson_15_states_all_bytes_of_its_third_exercise():
    """The task names what a count takes; rows and counts together are what a rank sends."""
    assert "8 bytes" in task("15", 3)

    def sends(rows, C, r):
        N, E = rows.shape
        pairs = rows.reshape(N, N, E // N).sum(axis=2)  # [from, to]
        away = pairs[r].sum() + pairs[:, r].sum() - 2 * pairs[r, r]
        return 2 * 4 * C * away + 8 * (N - 1) * (E // N)

    assert check("15.3")(sends) is None


def test_lesson_15_accepts_nested_lists():
    judged = check("15.1")
    assert judged(lambda chosen, capacity: route(chosen, 4, capacity).kept.tolist()) is None
    assert "[B, T, k]" in judged(lambda chosen, capacity: None)


def test_the_formulas_of_lesson_20_solve_its_first_exercise():
    (lesson,) = [each for each in LESSONS if each.number == "20"]
    (row,) = re.findall(r"^\| numbers, all ranks \|(.*)$", lesson.prose, re.MULTILINE)
    data, per_block, ends = map(
        int, re.search(r"\$(\d+) \(N-1\) P\$ \| \$\(N-1\) \((\d+) L \+ (\d+)\) B T C", row).groups()
    )
    judged = check("20.1")
    assert judged(lambda P, L, C, T: data * P / ((per_block * L + ends) * C * T)) is None
    assert "not" in judged(lambda P, L, C, T: data * P / (8 * L * C * T))


def test_lesson_7_says_which_parameter_an_answer_has_left_without_a_gradient():
    assert "layers.0.weight has no gradient" in check("07.3")(lambda model, x, y, m: None)
