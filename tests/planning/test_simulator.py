"""The simulator against a longest path, a clock that ticks, and the papers' formulas, exactly."""

import random as randoms
import sys
import time
from collections import deque
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import add_communication, programs
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    SendActivation,
    Stuck,
    Transfer,
    Update,
)
from minidist.planning import simulate, simulator
from tests.pipeline_parallel.oracles import ends, ticks
from tests.strategies import linear_extensions, schedules

times = st.fractions(Fraction(1, 7), 5, max_denominator=12)
whole = st.integers(1, 4)
cases = linear_extensions() | schedules()


def duration_of(made, forward, inputs, weights, update=0):
    """Return (rank, action) -> its time, for numbers that hold for a full stage."""
    kinds = {
        Forward: forward,
        Backward: inputs + weights,
        BackwardInput: inputs,
        BackwardWeight: weights,
        Update: update,
    }

    def duration(r, a):
        if isinstance(a, Transfer):
            return 0
        return Fraction(kinds[type(a)]) / len(made.placement[r])

    return duration


def assert_equals_the_longest_path(made, simulation, duration, delay=0, buffer=None):
    when = ends(made, duration, delay, buffer)
    assert simulation.makespan == max(when.values(), default=0)
    for r, program in enumerate(made):
        compute = [at for at, a in enumerate(program) if not isinstance(a, Transfer)]
        spent = [duration(r, program[at]) for at in compute]
        starts = [when[r, at] - time for at, time in zip(compute, spent, strict=True)]
        assert simulation.busy[r] == sum(spent)
        assert simulation.spans[r] == (when[r, compute[-1]] - starts[0] if compute else 0)


@settings(max_examples=150)
@given(drawn=cases, f=times, i=times, w=times, u=times, latency=times | st.just(0))
def test_any_program_takes_as_long_as_its_longest_path(drawn, f, i, w, u, latency):
    made, _, _ = drawn
    found = simulate(made, f, i, w, latency=latency, update=u)
    assert_equals_the_longest_path(made, found, duration_of(made, f, i, w, u), latency)
    assert isinstance(found.makespan, Fraction | int) and isinstance(found.bubble, Fraction | int)
    again = (
        simulate(made, f, i, w, latency=latency / 2, bandwidth=2 / latency, update=u)
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
    v = len(made.placement[0])
    duration = duration_of(made, f * v, i * v, w * v)
    want = ticks(made, lambda r, a: int(duration(r, a)), latency, buffer)
    if want is None:
        with pytest.raises(Stuck) as caught:
            simulate(made, f * v, i * v, w * v, latency=latency, buffer=buffer)
        assert caught.value.waiting
        for r, a in caught.value.waiting.items():
            assert a in made[r] and f"rank {r} before {a}" in str(caught.value)
    else:
        found = simulate(made, f * v, i * v, w * v, latency=latency, buffer=buffer)
        assert found.makespan == max(want)


def test_a_deadlock_names_the_action_before_which_each_rank_waits():
    with pytest.raises(Stuck, match="rank 0 before B0, rank 1 before F1") as caught:
        simulate(Programs([[Forward(0), Backward(0)], [Forward(1), Backward(1)]]))
    assert caught.value.waiting == {0: Backward(0), 1: Forward(1)}
    sends = [[SendActivation(0, 0, 1, 0)], [SendActivation(0, 0, 0, 0)]]
    with pytest.raises(Stuck) as caught:
        simulate(sends, buffer=0)
    assert caught.value.waiting == {0: sends[0][0], 1: sends[1][0]}
    assert simulate(sends, buffer=1).makespan == 0


class AnyOrder(deque):
    """A queue that gives what it likes."""

    random = randoms.Random(0)

    def popleft(self):
        self.rotate(self.random.randrange(len(self)))
        return super().popleft()


@settings(max_examples=50)
@given(drawn=cases, f=times, i=times, w=times, latency=times, explicit=st.booleans())
def test_the_result_does_not_depend_on_the_order_in_which_ranks_are_resumed(
    drawn, f, i, w, latency, explicit
):
    made = add_communication(drawn[0]) if explicit else drawn[0]
    more = {"latency": latency, "buffer": 2 if explicit else None}
    try:
        want = simulate(made, f, i, w, **more)
    except Stuck:
        return
    sound, simulator.deque = simulator.deque, AnyOrder
    try:
        for _ in range(3):
            assert simulate(made, f, i, w, **more) == want
    finally:
        simulator.deque = sound


@settings(max_examples=50)
@given(drawn=cases, f=times, i=times, w=times, latency=times, explicit=st.booleans())
def test_the_timeline_has_every_action_when_it_happens(drawn, f, i, w, latency, explicit):
    made = add_communication(drawn[0]) if explicit else drawn[0]
    found, duration = simulate(made, f, i, w, latency=latency), duration_of(made, f, i, w)
    when, events = ends(made, duration, latency), found.timeline.events
    compute = [e for e in events if e.category == "compute"]
    want = {
        (r, str(a), when[r, at])
        for r, program in enumerate(made)
        for at, a in enumerate(program)
        if duration(r, a)
    }
    assert {(e.rank, e.name, e.end) for e in compute} == want and len(compute) == len(want)
    assert sum(e.end - e.start for e in compute) == sum(found.busy)
    assert max(e.end for e in events) == found.makespan
    assert simulate(made, f, i, w, latency=latency) == found


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
    ],
)
def test_times_that_cannot_be_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        simulate(programs("1f1b", 2, 2), **more)


# Closed forms. TF, TI, TW: times of the forward pass and of the two halves of the backward pass of
# a stage; TB = TI + TW. All numbers are Fractions and all comparisons are ==.

DURATIONS = [
    tuple(map(Fraction, t))
    for t in (*product((1, 2, 3), repeat=3), ("1/3", "2/7", "1/5"), (5, 1, 3), (7, 5, 6), (1, 9, 9))
]
P, M = range(1, 7), (1, 2, 3, 4, 5, 6, 7, 9, 12)


def idle(schedule, p, m, t, chunks=1):
    """Return the time per rank in which it does not compute; it is the same on every rank."""
    found = simulate(programs(schedule, p, m, chunks), *t)
    assert set(found.busy) == {m * sum(t)}
    assert found.bubble == 1 - m * sum(t) / found.makespan
    return found.makespan - found.busy[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_p_less_one_forwards_and_backwards(schedule):
    for p, m, t in product(P, M, DURATIONS):
        assert idle(schedule, p, m, t) == (p - 1) * sum(t)
    assert simulate(programs(schedule, 4, 8)).bubble == Fraction(3, 11)  # (p - 1) / (m + p - 1)


def test_layer_split_works_on_one_rank_at_a_time():
    for p, m, t in product(P, (1, 2, 5), DURATIONS):
        assert idle("layer_split", p, m, t) == (p - 1) * m * sum(t)


def test_interleaving_divides_the_bubble_by_the_chunks():
    for p, rounds, v, t in product(P, (1, 2, 3), (1, 2, 3), DURATIONS):
        assert idle("interleaved", p, rounds * p, t, v) == (p - 1) * sum(t) / v


def test_zb_h1_idles_by_the_formula_where_m_is_at_least_p_and_w_is_the_shortest():
    """And only there: at any other place of the grid it idles longer."""
    for p, m, t in product(P[1:], M, DURATIONS):
        f, i, w = t
        formula, found = (p - 1) * (f + i - w), idle("zb_h1", p, m, t)
        assert (found == formula) == (m >= p and w <= min(f, i)), (p, m, t)
        assert found >= formula


def test_zb_h2_idles_by_the_formula_in_its_span_where_m_is_2p_less_1_and_w_is_no_longer_than_f():
    """Its domain: m >= 2p - 1, TW <= TF, 2 TW <= TF + TI; outside of it the span is longer."""
    for p, m, t in product(P[1:], M, DURATIONS):
        f, i, w = t
        found = simulate(programs("zb_h2", p, m), *t)
        formula = (p - 1) * (f + i - 2 * w)
        domain = m >= 2 * p - 1 and w <= f and 2 * w <= f + i
        assert (found.span - found.busy[0] == formula) == domain, (p, m, t)
        assert found.span - found.busy[0] >= formula
        if domain and f == i == w:
            assert found.span_bubble == 0 and found.makespan == found.span + (p - 1) * f


def test_zb_v_has_no_bubble_where_all_three_take_the_same_time_and_m_is_2p_less_1():
    for p, m in product(P[1:], range(1, 14)):
        found = simulate(programs("zb_v", p, m), *[Fraction(2, 3)] * 3)
        assert (found.span_bubble == 0) == (m >= 2 * p - 1), (p, m)
        if m >= 2 * p - 1:  # the last rank starts after p - 1 chunks' forwards
            assert found.makespan - found.span == (p - 1) * Fraction(1, 3)
    assert simulate(programs("zb_v", 3, 9), 2, 1, 1).span_bubble > 0


def test_one_rank_never_idles():
    for schedule, m, t in product(("gpipe", "zb_h1", "zb_h2", "zb_v"), M, DURATIONS):
        assert idle(schedule, 1, m, t) == 0


PEAKS = {  # schedule: (p, m, rank) -> passes in flight, in stages
    "layer_split": lambda p, m, r: 1,
    "gpipe": lambda p, m, r: m,
    "1f1b": lambda p, m, r: min(m, p - r),
    "zb_h1": lambda p, m, r: min(m, p),
    "zb_h2": lambda p, m, r: min(m, 2 * p - 1),
    "zb_v": lambda p, m, r: min(m, p, Fraction(m + 1 + r, 2)),
    "pipedream": lambda p, m, r: min(m, p - r),
    "pipedream_2bw": lambda p, m, r: min(m, p - r),
}


@pytest.mark.parametrize("schedule", PEAKS)
def test_the_stash_has_a_closed_form(schedule):
    for p, m in product(P, range(1, 14)):
        found = simulate(programs(schedule, p, m), 2, 1, 3).peak_stash
        assert found == [PEAKS[schedule](p, m, r) for r in range(p)], (p, m)


def test_the_stash_of_interleaved_counts_a_chunk_as_its_share_of_a_stage():
    for p, rounds, v in product(P, (1, 2, 3), (1, 2, 3)):
        m = rounds * p
        found = simulate(programs("interleaved", p, m, v)).peak_stash
        want = [Fraction(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1), v) for r in range(p)]
        assert found == want, (p, m, v)


def test_weights_put_last_cost_the_stash_of_all_micro_batches():
    for schedule, p, m in product(("1f1b", "zb_h1", "zb_v"), P, (1, 4, 6)):
        assert simulate(programs(schedule, p, m, weights_last=True)).peak_stash == [m] * p


def test_an_empty_program_takes_no_time():
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_the_work_per_action_does_not_grow_with_the_ranks(schedule):
    def calls(p):
        made = programs(schedule, p, p)
        return calls_of(lambda: simulate(made, 1.0, 1.0, 1.0)) / sum(map(len, made))

    small, large = calls(8), calls(32)
    assert large < 1.1 * small and large < 12


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
    start = time.monotonic()
    found = simulate(made)
    assert time.monotonic() - start < 10
    assert found.makespan == 3 * (1000 + 999)
