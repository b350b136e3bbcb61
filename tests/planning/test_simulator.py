"""The simulator against a longest path and a clock that ticks: any program, exactly."""

import time
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
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
from minidist.pipeline_parallel.communication import transfers_of
from minidist.pipeline_parallel.execution_order import Stuck
from minidist.planning import simulate
from minidist.planning.simulator import critical_path, needs, waits
from tests.pipeline_parallel.oracles import ends, ticks
from tests.strategies import chunks_of, linear_extensions, schedules, with_or_without_reductions

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


@settings(max_examples=60)
@given(drawn=cases, f=times, i=times, w=times, u=times, r=times, latency=times | st.just(0))
def test_program_takes_as_long_as_its_longest_path(drawn, f, i, w, u, r, latency):
    made, _, _ = drawn
    found = simulate(made, f, i, w, latency=latency, update=u, reduce=r)
    assert_equals_the_longest_path(made, found, duration_of(made, f, i, w, u, r), latency)
    assert isinstance(found.makespan, Fraction | int) and isinstance(found.bubble, Fraction | int)
    if latency:
        more = {"latency": latency / 2, "bandwidth": 2 / latency, "update": u, "reduce": r}
        assert simulate(made, f, i, w, **more) == found


@settings(max_examples=60)
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


@settings(max_examples=100)
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


def test_a_deadlock_names_the_action_before_which_each_rank_waits():
    with pytest.raises(Stuck, match="rank 0 before B0, rank 1 before F1") as caught:
        simulate(Programs([[Forward(0), Backward(0)], [Forward(1), Backward(1)]]))
    assert caught.value.waiting == {0: Backward(0), 1: Forward(1)}
    sends = [[SendActivation(0, 0, 1, 0)], [SendActivation(0, 0, 0, 0)]]
    with pytest.raises(Stuck) as caught:
        simulate(sends, buffer=0)
    assert caught.value.waiting == {0: sends[0][0], 1: sends[1][0]}
    assert simulate(sends, buffer=1).makespan == 0


@settings(max_examples=30)
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


def test_times_may_be_decimals_and_stay_exact():
    times = {"backward_input": Decimal("0.2"), "backward_weight": Decimal("0.3")}
    found = simulate(programs("zb_h1", 2, 3), Decimal("0.1"), **times, latency=Decimal("0.7"))
    tenths = simulate(programs("zb_h1", 2, 3), 1, 2, 3, latency=7)
    assert found.makespan * 10 == tenths.makespan and isinstance(found.makespan, Decimal)
    with pytest.raises(ValueError, match="a duration is a number from 0, not Decimal"):
        simulate(programs("1f1b", 2, 2), Decimal("nan"))


def test_a_hundred_ranks_and_micro_batches_are_no_matter():
    made = programs("1f1b", 100, 100)
    start = time.process_time()
    simulate(made)
    assert time.process_time() - start < sum(map(len, made)) / 10_000  # 20 times what it takes


def spans(simulation, rank):
    events = [e for e in simulation.timeline.events if e.rank == rank and e.category == "compute"]
    return [(e.name, e.start, e.end) for e in events]


def test_a_sender_goes_on_when_its_send_is_over_and_the_receiver_need_not_wait_for_that():
    simulation = simulate(programs("gpipe", 2, 2), overhead=0.5)
    first = [("F0", 0, 1), ("F1", 1.5, 2.5), ("B1", 5.5, 7.5), ("B0", 8.0, 10.0)]
    assert spans(simulation, 0) == first
    second = [("F0", 1, 2), ("F1", 2.5, 3.5), ("B1", 3.5, 5.5), ("B0", 6.0, 8.0)]
    assert spans(simulation, 1) == second
    assert simulation.busy == [6, 6] and simulation.spans == [10, 7]


def test_transfers_that_are_written_down_cost_what_implied_ones_cost():
    for schedule in SCHEDULES:
        bare = programs(schedule, 3, 6, chunks_of(schedule))
        times = {"latency": 2, "overhead": 1, "forward": 3}
        implied, written = simulate(bare, **times), simulate(add_communication(bare), **times)
        for name in ("makespan", "spans", "busy", "peak_stash"):
            assert getattr(implied, name) == getattr(written, name), schedule
        for rank in range(3):
            assert spans(implied, rank) == spans(written, rank), schedule
    alone = programs("zb_v", 1, 4)  # what stays on its rank costs nothing
    for made in (alone, add_communication(alone)):
        assert simulate(made, overhead=100).makespan == simulate(alone).makespan


TIMES = st.fixed_dictionaries(
    dict.fromkeys(
        ["forward", "backward_input", "backward_weight", "latency", "overhead"],
        st.fractions(0, 5, max_denominator=12),
    )
)


def path_of(made, **durations):
    simulation = simulate(made, **durations)
    clocks = simulation.moments
    return critical_path(waits(needs(made), clocks), clocks), simulation


def pieces(made, path, forward, backward_input, backward_weight, latency, overhead):
    """Yield the lengths of a path's pieces; they know durations and programs, and no clock."""
    v = Fraction(sum(map(len, made.placement)), len(made))
    transfers = transfers_of(made)
    kinds = {Forward: forward, Backward: backward_input + backward_weight, Update: 0}
    kinds[BackwardWeight] = backward_weight

    def busy_after(r, i):
        _, send = transfers(r, made[r][i])
        return overhead if send and send.peer != r else 0

    for r, i in path:
        yield kinds.get(type(made[r][i]), backward_input) / v
    for (r, i), (q, j) in pairwise(path):
        assert (r, i + 1) == (q, j) or r != q
        yield busy_after(r, i) if r == q else latency
    yield busy_after(*path[-1])


@settings(max_examples=100)
@given(case=linear_extensions() | schedules(), times=TIMES)
def test_the_pieces_of_the_path_add_up_to_the_makespan_of_any_order(case, times):
    made = case[0]
    stages = [k for own in made.placement for k in own]
    assume(len(set(stages)) == len(stages))  # replicas meet at updates: a path has no message there
    path, simulation = path_of(made, **times)
    assert sum(pieces(made, path, **times)) == simulation.makespan


def test_the_path_of_1f1b_on_two_ranks_goes_through_all_of_the_second():
    path, _ = path_of(programs("1f1b", 2, 2))
    assert path == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 3)]
