"""A transfer that keeps its sender busy, in the simulator."""

import pytest

from minidist.pipeline_parallel import SCHEDULES, add_communication, programs
from minidist.planning import simulate
from tests.strategies import chunks_of


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


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_transfers_that_are_written_down_cost_what_implied_ones_cost(schedule):
    bare = programs(schedule, 3, 6, chunks_of(schedule))
    times = {"latency": 2, "overhead": 1, "forward": 3}
    implied, written = simulate(bare, **times), simulate(add_communication(bare), **times)
    for name in ("makespan", "spans", "busy", "peak_stash"):
        assert getattr(implied, name) == getattr(written, name)
    for rank in range(3):
        assert spans(implied, rank) == spans(written, rank)


def test_what_stays_on_its_rank_costs_no_overhead():
    bare = programs("zb_v", 1, 4)
    assert simulate(bare, overhead=100).makespan == simulate(bare).makespan
    written = add_communication(bare)
    assert simulate(written, overhead=100).makespan == simulate(written).makespan
