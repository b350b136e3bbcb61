"""The simulator against a longest path and a clock that ticks: any program, exactly."""

import sys
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import SCHEDULES, add_communication, programs
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    Reduce,
    SendActivation,
    Transfer,
    Update,
)
from minidist.pipeline_parallel.execution_order import Stuck
from minidist.planning import simulate
from tests.pipeline_parallel.oracles import ends, ticks
from tests.strategies import linear_extensions, schedules, with_or_without_reductions

times = st.fractions(Fraction(1, 7), 5, max_denominator=12)
whole = st.integers(1, 4)
cases = with_or_without_reductions(linear_extensions() | schedules())


def duration_of(made, forward, inputs, weights, update=0, reduce=0):
    """Return (rank, action) -> its time, for numbers that hold for a full stage."""
    kinds = {
        Forward: forward,
        Backward: inputs + weights,
        BackwardInput: inputs,
        BackwardWeight: weights,
        Update: update,
        Reduce: reduce,
    }

    def duration(r, a):
        if isinstance(a, Transfer):
            return 0
        return kinds[type(a)] / v

    v = chunks_per_rank(made)
    return duration


def chunks_per_rank(made):
    return Fraction(sum(map(len, made.placement)), len(made))


def assert_equals_the_longest_path(made, simulation, duration, delay=0, buffer=None):
    when = ends(made, duration, delay, buffer)
    assert simulation.makespan == max(when.values(), default=0)
    for r, program in enumerate(made):
        compute = [at for at, a in enumerate(program) if not isinstance(a, Transfer | Reduce)]
        spent = [duration(r, program[at]) for at in compute]
        starts = [when[r, at] - time for at, time in zip(compute, spent, strict=True)]
        assert simulation.busy[r] == sum(spent)
        assert simulation.spans[r] == (when[r, compute[-1]] - starts[0] if compute else 0)


@settings(max_examples=150)
@given(drawn=cases, f=times, i=times, w=times, u=times, r=times, latency=times | st.just(0))
def test_program_takes_as_long_as_its_longest_path(drawn, f, i, w, u, r, latency):
    made, _, _ = drawn
    found = simulate(made, f, i, w, latency=latency, update=u, reduce=r)
    assert_equals_the_longest_path(made, found, duration_of(made, f, i, w, u, r), latency)
    assert isinstance(found.makespan, Fraction | int) and isinstance(found.bubble, Fraction | int)
    again = (
        simulate(made, f, i, w, latency=latency / 2, bandwidth=2 / latency, update=u, reduce=r)
        if latency
        else found
    )
    assert again == found


@settings(max_examples=150)
@given(
    drawn=cases,
    f=times,
    i=times,
    w=times,
    latency=times,
    buffer=st.sampled_from([None, 1, 2, 3]),
    safe=st.booleans(),
)
def test_with_transfers_and_bounded_buffers_too(drawn, f, i, w, latency, buffer, safe):
    made = add_communication(drawn[0], rendezvous_safe=safe)
    duration = duration_of(made, f, i, w)
    if ends(made, duration, latency, buffer) is None:
        with pytest.raises(Stuck):
            simulate(made, f, i, w, latency=latency, buffer=buffer)
    else:
        found = simulate(made, f, i, w, latency=latency, buffer=buffer)
        assert_equals_the_longest_path(made, found, duration, latency, buffer)


@settings(max_examples=200)
@given(
    drawn=cases.filter(lambda drawn: not any(isinstance(a, Update) for a in drawn[0][0])),
    f=whole,
    i=whole,
    w=whole,
    latency=st.integers(0, 3),
    buffer=st.sampled_from([0, 1, 2, None]),
    safe=st.booleans(),
)
def test_a_clock_that_ticks_says_the_same(drawn, f, i, w, latency, buffer, safe):
    """Also at rendezvous; and both say "deadlock" of the same programs."""
    made = add_communication(drawn[0], rendezvous_safe=safe)
    v = chunks_per_rank(made)
    duration = duration_of(made, f * v, i * v, w * v, reduce=w * v)
    want = ticks(made, lambda r, a: int(duration(r, a)), latency, buffer)
    if want is None:
        with pytest.raises(Stuck) as caught:
            simulate(made, f * v, i * v, w * v, latency=latency, buffer=buffer)
        assert caught.value.waiting
        for r, a in caught.value.waiting.items():
            assert a in made[r] and f"rank {r} before {a}" in str(caught.value)
    else:
        found = simulate(made, f * v, i * v, w * v, latency=latency, buffer=buffer, reduce=w * v)
        assert found.makespan == max(want)


def test_durations_of_stages_follow_them_to_their_ranks():
    made = [[Forward(0), Backward(0)], [Forward(0), Backward(0)]]
    found = simulate(Programs(made, [[1], [0]]), [3, 5], [0, 0], [0, 0])
    assert found.busy == [5, 3]
    made[0][1:1] = [Forward(0, 1), Backward(0, 1)]
    assert simulate(Programs(made, [[0, 1], [2]]), 3, 0, 0).busy == [4, 2]  # equal stages: 2 each
    assert simulate(Programs(made, [[0, 1], [2]]), [3, 3], 0, 0).busy == [3, 3]


def test_a_deadlock_names_the_action_before_which_each_rank_waits():
    with pytest.raises(Stuck, match="rank 0 before B0, rank 1 before F1") as caught:
        simulate(Programs([[Forward(0), Backward(0)], [Forward(1), Backward(1)]]))
    assert caught.value.waiting == {0: Backward(0), 1: Forward(1)}
    sends = [[SendActivation(0, 0, 1, 0)], [SendActivation(0, 0, 0, 0)]]
    with pytest.raises(Stuck) as caught:
        simulate(sends, buffer=0)
    assert caught.value.waiting == {0: sends[0][0], 1: sends[1][0]}
    assert simulate(sends, buffer=1).makespan == 0


@settings(max_examples=100)
@given(drawn=cases, f=times, i=times, w=times, latency=times, overhead=times | st.just(0))
def test_the_makespan_and_the_spans_are_those_of_the_moments(drawn, f, i, w, latency, overhead):
    made = drawn[0]
    found = simulate(made, f, i, w, latency=latency, overhead=overhead, reduce=f)
    if not any(isinstance(action, Update) for program in made for action in program):
        sent = simulate(
            add_communication(made), f, i, w, latency=latency, overhead=overhead, reduce=f
        )
        assert sent.makespan == found.makespan
    rows = found.moments
    assert found.makespan == max(max(row[-1][1:]) for row in rows if row)
    for program, row, span in zip(made, rows, found.spans, strict=True):
        computed = [m for a, m in zip(program, row, strict=True) if not isinstance(a, Reduce)]
        assert span == (computed[-1][1] - computed[0][0] if computed else 0)


@settings(max_examples=50)
@given(drawn=cases, f=times, i=times, w=times, latency=times, explicit=st.booleans())
def test_the_timeline_has_every_action_when_it_happens(drawn, f, i, w, latency, explicit):
    made = add_communication(drawn[0]) if explicit else drawn[0]
    found = simulate(made, f, i, w, latency=latency, reduce=f)
    duration = duration_of(made, f, i, w, reduce=f)
    when, events = ends(made, duration, latency), found.timeline.events
    compute = [e for e in events if e.category == "compute"]
    sums = [e for e in events if e.thread == "sums"]
    want = {
        (r, str(a), when[r, at])
        for r, program in enumerate(made)
        for at, a in enumerate(program)
        if duration(r, a)
    }
    shown = [*compute, *sums]
    assert {(e.rank, e.name, e.end) for e in shown} == want and len(shown) == len(want)
    assert all(e.category == "communication" and e.name[0] == "R" for e in sums)
    assert sum(e.end - e.start for e in compute) == sum(found.busy)
    assert max(e.end for e in events) == found.makespan
    assert simulate(made, f, i, w, latency=latency, reduce=f) == found


@pytest.mark.parametrize(
    "backward, busy", [(None, [12, 12]), (2, [4, 4]), ([5, 7], [10, 14]), ([1, 2, 3, 4], [8, 12])]
)
def test_a_backward_takes_as_long_as_its_halves_or_as_is_said(backward, busy):
    made = programs("interleaved", 2, 2, chunks=2)
    halves = {"backward_input": [2] * 4, "backward_weight": [1] * 4}
    assert simulate(made, 0, backward=backward, **halves).busy == busy


@given(p=st.integers(1, 4), m=st.integers(1, 4), data=st.data())
def test_durations_may_differ_by_rank_and_by_virtual_stage(p, m, data):
    made = programs("interleaved", p, m * p, chunks=2)
    per_rank = data.draw(st.lists(times, min_size=p, max_size=p))
    per_stage = data.draw(st.lists(times, min_size=2 * p, max_size=2 * p))

    def duration(r, a):
        k = made.placement[r][a.chunk]
        return per_rank[r] / 2 if isinstance(a, Forward) else per_stage[k] + Fraction(1, 2)

    found = simulate(made, per_rank, per_stage, 1)
    assert_equals_the_longest_path(made, found, duration)


@pytest.mark.parametrize("given_durations", [[1], [1, 2, 3], []])
def test_durations_of_a_wrong_length_are_refused(given_durations):
    with pytest.raises(
        ValueError, match="for 2 ranks with 4 virtual stages: give one number, 2, or 4"
    ):
        simulate(programs("zb_v", 2, 2), forward=given_durations)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"buffer": -1}, "0 or more messages, not -1"),
        ({"latency": -1}, "no transfer has latency -1 and bandwidth None"),
        ({"bandwidth": 0}, "no transfer has latency 0 and bandwidth 0"),
        ({"forward": [1, -2]}, "a duration is a number from 0, not -2"),
        ({"forward": float("nan")}, "a duration is a number from 0, not nan"),
        ({"update": float("inf")}, "a duration is a number from 0, not inf"),
        ({"backward_input": "1"}, "a duration is a number from 0, not '1'"),
        ({"backward_weight": 1j}, "a duration is a number from 0, not 1j"),
        ({"latency": float("nan")}, "no transfer has latency nan"),
        ({"latency": None}, "no transfer has latency None"),
        ({"bandwidth": float("nan")}, "and bandwidth nan"),
        ({"overhead": -1}, "an overhead is a number from 0, not -1"),
        ({"overhead": float("nan")}, "an overhead is a number from 0, not nan"),
        ({"buffer": 1.5}, "0 or more messages, not 1.5"),
    ],
)
def test_times_that_cannot_be_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        simulate(programs("1f1b", 2, 2), **more)


def test_durations_may_be_an_array():
    made = programs("1f1b", 2, 3)
    assert simulate(made, np.array([1.0, 2.0])) == simulate(made, [1.0, 2.0])


def test_times_may_be_decimals_and_stay_exact():
    times = {"backward_input": Decimal("0.2"), "backward_weight": Decimal("0.3")}
    found = simulate(programs("zb_h1", 2, 3), Decimal("0.1"), **times, latency=Decimal("0.7"))
    tenths = simulate(programs("zb_h1", 2, 3), 1, 2, 3, latency=7)
    assert found.makespan * 10 == tenths.makespan and isinstance(found.makespan, Decimal)
    for wrong in (Decimal("nan"), Decimal("inf"), Decimal(-1)):
        with pytest.raises(ValueError, match="a duration is a number from 0, not Decimal"):
            simulate(programs("1f1b", 2, 2), wrong)


def test_an_empty_program_takes_no_time():
    with pytest.raises(ValueError, match="there is no program for any rank"):
        simulate([])
    found = simulate([[], []])
    assert (found.makespan, found.span, found.bubble, found.busy) == (0, 0, 0, [0, 0])


# Speed. What can be counted is counted; the clock is looked at where there is much room.


def calls_of(work):
    """Return how many calls of Python functions `work` makes."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "zb_auto"])
def test_the_work_per_action_does_not_grow_with_the_ranks_nor_with_exact_shares(schedule):
    """A Fraction's sum would be some calls more; a chunk's share of a stage is one."""
    chunks = 4 if SCHEDULES[schedule].most_chunks is None else 1

    def calls(p):
        made = programs(schedule, p, 2 * p, chunks)
        return calls_of(lambda: simulate(made, latency=1)) / sum(map(len, made))

    small, large = calls(8), calls(32)
    assert large < small and large < 2


def seconds_per_action(p, m):
    made = programs("1f1b", p, m)
    simulate(programs("1f1b", 8, 8))
    start = time.process_time()
    simulate(made)
    return (time.process_time() - start) / sum(map(len, made))


def test_a_hundred_ranks_and_micro_batches_are_no_matter():
    assert seconds_per_action(100, 100) < 1 / 10_000  # twenty times what it takes


@pytest.mark.slow
def test_200_000_actions_per_second_and_a_thousand_by_a_thousand_within_10_s():
    assert min(seconds_per_action(200, 400) for _ in range(5)) < 1 / 200_000
    made = programs("1f1b", 1000, 1000)
    start = time.process_time()  # of this process alone, whatever else the machine does
    found = simulate(made)
    assert time.process_time() - start < 10
    assert found.makespan == 3 * (1000 + 999)
