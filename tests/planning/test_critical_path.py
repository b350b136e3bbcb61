"""The critical path against what it is made of: durations, latencies and overheads, exactly."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidist.pipeline_parallel import SCHEDULES, programs
from minidist.pipeline_parallel.actions import Backward, BackwardWeight, Forward, Update
from minidist.pipeline_parallel.communication import transfers_of
from minidist.planning import simulate
from minidist.planning.simulator import critical_path, needs, stash, waits
from tests.strategies import chunks_of, fitting, linear_extensions, schedules

times = st.fractions(0, 5, max_denominator=12)
TIMES = st.fixed_dictionaries(
    dict.fromkeys(["forward", "backward_input", "backward_weight", "latency", "overhead"], times)
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


@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), times=TIMES)
@settings(max_examples=200)
def test_the_pieces_of_the_path_add_up_to_the_makespan_on_every_named_schedule(data, name, times):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    made = programs(name, p, fitting(name, p, m), chunks_of(name))
    path, simulation = path_of(made, **times)
    assert path[0][1] == 0 and sum(pieces(made, path, **times)) == simulation.makespan


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


@pytest.mark.parametrize("overhead, clocks", [(0, [1, 2]), (1, [2, 4])])
def test_a_rank_goes_on_when_its_send_is_over(overhead, clocks):
    simulation = simulate(programs("gpipe", 2, 2), overhead=overhead)
    assert [clock for _, _, clock in simulation.moments[0][:2]] == clocks


def test_moments_have_what_takes_no_time_too():
    rows = simulate(programs("zb_h1", 2, 2), backward_weight=0).moments
    assert [len(row) for row in rows] == [6, 6]
    assert any(start == end for row in rows for start, end, _ in row)


@given(case=linear_extensions(), times=TIMES)
def test_moments_are_those_of_the_timeline(case, times):
    simulation = simulate(case[0], **times)
    events = {(e.rank, e.name): (e.start, e.end) for e in simulation.timeline.events}
    for r, (program, row) in enumerate(zip(case[0], simulation.moments, strict=True)):
        for action, (start, end, _) in zip(program, row, strict=True):
            assert events.get((r, str(action)), (start, start)) == (start, end)


def test_a_forward_pass_is_kept_from_its_start_to_the_end_of_its_backward():
    made = programs("1f1b", 2, 2)
    clocks = simulate(made).moments
    assert stash(made, clocks)[1] == [(0, 0), (1, 1), (4, 0), (4, 1), (7, 0)]
    made = programs("zb_v", 2, 4)
    simulation = simulate(made)
    rows = stash(made, simulation.moments)
    assert [max(n for _, n in row) for row in rows] == simulation.peak_stash
    assert rows[0][1] == (0, Fraction(1, 2))
