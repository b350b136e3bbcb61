"""The proof by symbols holds for every valid order, and fails where a gradient is not whole."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minidist.pipeline_parallel import add_reductions, programs
from minidist.pipeline_parallel.actions import BackwardWeight, Programs, Reduce, updates
from minidist.pipeline_parallel.execution_order import Stuck, in_order
from minidist.pipeline_parallel.text import read
from minidist.pipeline_parallel.validation import certificate, gradients
from tests.strategies import linear_extensions, schedules, with_or_without_reductions


@given(case=with_or_without_reductions(linear_extensions() | schedules()))
def test_every_valid_order_is_certified(case):
    made, _, m = case
    found = certificate(made, m)
    assert found["ok"], found["words"]
    whole = Counter(found["rows"][0]["micro_batches"])
    assert set(whole) <= set(range(m))


def test_the_words_say_what_is_proved():
    made = programs("zb_v", 2, 8)
    assert certificate(made, 8) == {
        "ok": True,
        "words": "every stage's parameters end with exactly the micro-batches 0 to 7, once",
        "rows": [
            {"stage": k, "rank": r, "micro_batches": list(range(8))}
            for k, r in enumerate([0, 1, 1, 0])
        ],
    }


def test_one_that_updates_in_between_is_no_proof_that_the_gradients_are_those_of_one_device():
    words = certificate(programs("pipedream", 3, 4), 4)["words"]
    assert words == (
        "every stage's updates apply exactly the micro-batches 0 to 3, once; weights change in "
        "between, so the gradients are not those of one device"
    )


def test_replicas_of_a_stage_have_its_micro_batches_together():
    found = certificate(programs("pipedream", 3, 4, replicas=[2, 1]), 4)
    assert found["ok"] and [row["micro_batches"] for row in found["rows"]] == [
        [0, 2],
        [1, 3],
        [0, 1, 2, 3],
    ]


NOT_WHOLE = {  # none of them valid; all can be executed
    "a micro-batch goes twice": ("rank 0 F0 F0 B0 B0\nrank 1 F0 B0", "stage 0 ends with [0, 0]"),
    "a backward is counted twice": ("rank 0 F0 B0 W0\nrank 1 F0 B0", "stage 0 ends with [0, 0]"),
    "a weight half is missing": ("rank 0 F0 B0\nrank 1 F0 I0", "stage 1 ends with []"),
    "a backward is missing": ("rank 0 F0\nrank 1 F0 B0", "stage 0 ends with []"),
    "a micro-batch is missing": ("rank 0 F0 F1 B1\nrank 1 F0 F1 B1 B0", "stage 0 ends with [1]"),
    "an update is missing": ("rank 0 F0 B0 U0 F1 B1", "stage 0 ends with [0]"),
    "a sum is too early": ("rank 0 F0 B0 F1 R B1", "stage 0 ends with [0]"),
}


@pytest.mark.parametrize("what", NOT_WHOLE)
def test_programs_whose_gradient_is_not_whole_are_not_certified(what):
    text, words = NOT_WHOLE[what]
    made = read(text)
    found = certificate(made, 2 if "F1" in text else 1)
    assert not found["ok"] and found["words"].startswith(words)


def test_a_deadlock_has_no_certificate():
    with pytest.raises(Stuck, match="rank 0 before B0"):
        certificate(read("rank 0 F0 B0\nrank 1 F1 B1"), 2)


@given(case=linear_extensions())
def test_steps_in_an_order_that_no_ranks_can_execute_do_not_add_up(case):
    """Backward and forward of two stages change places: a pass has not gone through the others."""
    made, _, m = case
    steps = list(chain.from_iterable(in_order(made)))
    left, _ = gradients(made.placement, steps)
    assert all(own == Counter(range(m)) for own in left.values())
    if len(left) > 1:
        left, _ = gradients(made.placement, steps[::-1])
        assert any(own != Counter(range(m)) for own in left.values())


@given(case=schedules() | linear_extensions(), random=st.randoms(use_true_random=False))
def test_without_any_one_of_its_weight_gradients_a_program_is_not_certified(case, random):
    made, _, m = case
    places = [
        (r, i)
        for r, program in enumerate(made)
        for i, action in enumerate(program)
        if isinstance(action, BackwardWeight)
    ]
    assume(places and not updates(made))
    rank, at = random.choice(places)
    less = [[a for i, a in enumerate(own) if (r, i) != (rank, at)] for r, own in enumerate(made)]
    assert not certificate(Programs(less, made.placement), m)["ok"]


def test_where_gradients_are_summed_inside_only_what_r_sums_counts():
    made = add_reductions(programs("1f1b", 2, 2))
    assert certificate(made, 2)["ok"]
    late = [[a for a in own if not isinstance(a, Reduce)] for own in made]
    made = Programs([[Reduce(), *late[0]], made[1]], made.placement)
    assert certificate(made, 2)["words"].startswith("stage 0 ends with []")
