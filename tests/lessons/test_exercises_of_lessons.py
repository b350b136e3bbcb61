"""The checks of the lessons' exercises accept what their pages ask for, in any form."""

import ast
import re
from functools import partial
from pathlib import Path

import pytest

from minidist import Cluster, datasets, nn
from minidist.nn.router import route
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.fixture(autouse=True, scope="module")
def as_a_script():
    """A script finds `support` beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(LESSONS)
        yield


def page(number: str) -> str:
    (path,) = LESSONS.glob(f"{number}_*.py")
    return path.read_text(encoding="utf-8")


def part_of(number: str, names: set[str], **values) -> dict:
    """Return a lesson's imports and what it defines by these names; nothing else of it runs."""
    body = ast.parse(page(number)).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found = [node for node in definitions if node.name in names]
    assert {node.name for node in found} == names
    namespace = {"__name__": "lesson", **values}
    exec(compile(ast.Module(imports + found, []), f"lesson {number}", "exec"), namespace)
    return namespace


def markdown(number: str, heading: str) -> str:
    """Return the words of an exercise, without line breaks."""
    text = page(number).split(f"# ## {heading}")[1].split("# %%\n")[0]
    return " ".join(line.lstrip("# ") for line in text.splitlines())


@pytest.fixture(scope="module")
def finds_another_schedule():
    return part_of("07", {"show", "finds_another_schedule"})["finds_another_schedule"]


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
def test_lesson_7_accepts_halves_of_backward_in_any_order(finds_another_schedule, inputs, weights):
    attempt = partial(weights_last, inputs=inputs, weights=weights)
    assert finds_another_schedule(attempt) is None


def test_lesson_7_accepts_another_schedule_whose_weights_come_last(finds_another_schedule):
    assert finds_another_schedule(one_forward_one_backward_first) is None


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
def test_lesson_7_refuses_what_is_not_asked_for(finds_another_schedule, attempt, words):
    try:
        fault = finds_another_schedule(attempt)
    except ValueError as error:
        fault = str(error)
    assert words in fault


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
    check = part_of("08", {"show", "finds_another_schedule"})["finds_another_schedule"]
    assert check(lambda rank, p, m: programs("1f1b", p, m)[rank]) is None
    assert check(newest_first) is None
    assert "the stash is" in check(lambda rank, p, m: programs("gpipe", p, m)[rank])
    assert "units, not" in check(late_start)


def test_lesson_15_states_all_bytes_of_its_third_exercise():
    """The task names what a count takes; rows and counts together are what a rank sends."""
    assert "8 bytes" in markdown("15", "Exercise 3").split("*Hint:*")[0]

    def sends(rows, C, r):
        N, E = rows.shape
        pairs = rows.reshape(N, N, E // N).sum(axis=2)  # [from, to]
        away = pairs[r].sum() + pairs[:, r].sum() - 2 * pairs[r, r]
        return 2 * 4 * C * away + 8 * (N - 1) * (E // N)

    names = {"Travel", "our_dispatch", "travel_alone", "check_sends"}
    with Cluster(4, "thread") as ranks:
        lesson = part_of("15", names, clusters={4: ranks}, C=32, E=8)
        assert lesson["check_sends"](sends) is None


def test_the_formulas_of_lesson_20_solve_its_first_exercise():
    data, per_block, ends = (
        int(re.search(pattern, page("20"))[1])
        for pattern in (
            r"data (\d+) P;",
            r"`sequence` (\d+) B T C per block",
            r"`sequence` .*, (\d+) B T C at the ends",
        )
    )
    check = part_of("20", {"check_crossing"})["check_crossing"]

    def crossing(P, L, C, T):
        return data * P / ((per_block * L + ends) * C * T)

    assert check(crossing) is None
    assert "not" in check(lambda P, L, C, T: data * P / (8 * L * C * T))


def test_lesson_15_accepts_nested_lists():
    check = part_of("15", {"check_kept"})["check_kept"]
    assert check(lambda chosen, capacity: route(chosen, 4, capacity).kept.tolist()) is None
    assert "[B, T, k]" in check(lambda chosen, capacity: None)


def test_lesson_7_says_which_parameter_an_answer_has_left_without_a_gradient():
    images, labels = datasets.digits()
    given = {"images": images, "labels": labels, "model": nn.MLP([64, 8, 10], dtype="float64")}
    names = {"finds_another_gradient", "one_device", "error"}
    check = part_of("07", names, **given)["finds_another_gradient"]
    assert "layers.0.weight has no gradient" in check(lambda model, x, y, m: None)
