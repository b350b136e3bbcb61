"""Ranks that share cores: against the simulator, against a formula, and against what must hold."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.pipeline_parallel import add_communication
from minidist.pipeline_parallel.actions import (
    RECEIVES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Transfer,
    Update,
    other_end,
)
from minidist.pipeline_parallel.execution_order import message
from minidist.planning import simulate
from minidist.planning.shared_cores import Meet, Receive, Send, Work, ends
from tests.strategies import schedules

times = st.fractions(Fraction(1, 7), 5, max_denominator=12)
drawn = schedules().map(lambda case: case[0])  # programs of a known schedule
works = st.lists(times, min_size=1, max_size=5)


def test_a_rank_that_waits_takes_no_core():
    """Rank 1 waits for rank 0; rank 2 works meanwhile: two ranks on two cores, at full speed."""
    programs = [[Work(3), Send("x")], [Receive("x"), Work(1)], [Work(3)]]
    assert ends(programs, 2) == [3, 4, 3], "a rank that waits has taken a share of the cores"


def test_ranks_beyond_the_cores_slow_each_other():
    assert ends([[Work(1)]] * 4, 2) == [2] * 4
    assert ends([[Work(1)]] * 4, 4) == ends([[Work(1)]] * 4, 9) == [1] * 4
    assert ends([[Work(1)], [Work(1)], [Work(2)]], 2) == [Fraction(3, 2)] * 2 + [Fraction(5, 2)]
    assert ends([[Work(3)]], Fraction(1, 2)) == [6], "half a core is left for one rank"


@given(works, st.integers(1, 5))
def test_ranks_that_do_not_communicate_end_in_the_order_of_their_work(works, cores):
    """Until the least of k works is done, all of them go on at min(1, cores / k)."""
    now, done, wanted = Fraction(0), Fraction(0), {}
    for k, (work, r) in zip(
        range(len(works), 0, -1), sorted((w, r) for r, w in enumerate(works)), strict=True
    ):
        now += (work - done) * max(1, Fraction(k, cores))
        done, wanted[r] = work, now
    assert ends([[Work(w)] for w in works], cores) == [wanted[r] for r in range(len(works))]


def steps_of(made, forward, inputs, weights):
    """Return a pipeline's programs as work and messages."""
    seconds = {
        Forward: forward,
        Backward: inputs + weights,
        BackwardInput: inputs,
        BackwardWeight: weights,
        Update: 0,
    }
    v = Fraction(sum(map(len, made.placement)), len(made))

    def step(r, action, delay):
        if not isinstance(action, Transfer):
            return Work(seconds[type(action)] / v)
        if type(action) in RECEIVES:
            return Receive(message(action.peer, other_end(action, r)))
        return Send(message(r, action), 0 if action.peer == r else delay)

    def all_steps(delay):
        explicit = add_communication(made)
        return [[step(r, a, delay) for a in program] for r, program in enumerate(explicit)]

    return all_steps


@given(drawn, times, times, times, times)
def test_with_a_core_for_each_rank_the_ends_are_the_simulators(made, forward, i, w, latency):
    programs = steps_of(made, forward, i, w)(latency)
    simulated = simulate(made, forward, i, w, latency)
    assert max(ends(programs, len(made))) == simulated.makespan


@given(drawn, times, times, times)
def test_one_core_is_never_idle_while_messages_take_no_time(made, forward, i, w):
    programs = steps_of(made, forward, i, w)(0)
    total = sum(step.seconds for program in programs for step in program if type(step) is Work)
    assert max(ends(programs, 1)) == total


@given(drawn, times, times, times, times, st.integers(1, 4))
def test_no_core_does_more_than_its_time(made, forward, i, w, latency, cores):
    programs = steps_of(made, forward, i, w)(latency)
    each = [sum(s.seconds for s in program if type(s) is Work) for program in programs]
    found = ends(programs, cores)
    assert sum(each) <= cores * max(found)
    assert all(end >= own for end, own in zip(found, each, strict=True))
    assert max(found) >= max(ends(programs, len(made)))


def test_a_meeting_begins_when_its_last_rank_comes():
    both, pair = Meet((0, 1, 2)), Meet((0, 1))
    programs = [
        [Work(1), both, Work(1), pair],
        [Work(4), both, pair, pair],
        [both, Work(1)],
    ]
    programs[0] += [pair]
    assert ends(programs, 3) == [5, 5, 5]


def test_two_groups_of_the_same_ranks_meet_apart():
    a, b = Meet((0, 1), ("a",)), Meet((0, 1), ("b",))
    with pytest.raises(ValueError, match="rank 0 waits forever at step 0"):
        ends([[a, b], [b, a]], 2)


@pytest.mark.parametrize("programs", [[[Receive("x")]], [[Meet((0, 1))], []]])
def test_a_rank_that_can_never_go_on_is_an_error(programs):
    with pytest.raises(ValueError, match=r"rank 0 waits forever .*give every Receive its Send"):
        ends(programs, 1)


@pytest.mark.parametrize("cores", [0, -1])
def test_there_is_a_core(cores):
    with pytest.raises(ValueError, match="share more than 0 cores"):
        ends([[Work(1)]], cores)
