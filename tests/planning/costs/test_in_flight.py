"""What a pipeline has in flight for many micro-batches is read off its programs for few."""

from itertools import product

import pytest

from minidist.pipeline_parallel import SCHEDULES, programs
from minidist.planning.costs.stages import entries, in_flight, largest, placement

PRICED = [name for name in SCHEDULES if not name.startswith("pipedream")]
CHUNKS = {"interleaved": (1, 2, 3), "interleaved_zb": (1, 2), "looped_bfs": (1, 2)}
V_SHAPED = "zb_v", "dualpipe_v", "v_half", "v_min"


def grid(schedule, most_ranks, rounds):
    """Yield (p, m, v) that the schedule takes, with several p of micro-batches and a rest."""
    for p, v in product(
        range(1, most_ranks + 1), CHUNKS.get(schedule, (1 + (schedule in V_SHAPED),))
    ):
        step = p if "interleaved" in schedule else 1
        least = 2 * p if schedule == "dualpipe_v" else step
        yield from ((p, m, v) for m in range(least, rounds * p + 2, step))


def check(schedule, most_ranks, rounds):
    for p, m, v in grid(schedule, most_ranks, rounds):
        made = programs(schedule, p, m, v)
        want = tuple(entries(made[r], len(made.placement[r])) for r in range(p))
        assert in_flight(schedule, p, m, v) == want, (p, m, v)
        assert placement(schedule, p, v) == made.placement


@pytest.mark.parametrize("schedule", PRICED)
def test_what_is_in_flight_is_the_same_or_grows_evenly_beyond_a_few_p_micro_batches(schedule):
    check(schedule, 3, 8)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PRICED)
def test_the_same_on_more_ranks(schedule):
    check(schedule, 7, 9)


def test_a_known_program_is_read_by_hand():
    assert in_flight("1f1b", 4, 9, 1) == (((4, 0),), ((3, 0),), ((2, 0),), ((1, 0),))
    assert in_flight("gpipe", 2, 100, 1) == (((100, 0),),) * 2
    assert in_flight("zb_h1", 3, 50, 1)[2] == ((3, 2),)  # on the last rank all but one wait for W


def test_entries_that_another_one_exceeds_are_left_out():
    assert sorted(largest({(1, 2), (2, 1), (1, 1), (2, 0), (0, 2)})) == [(1, 2), (2, 1)]
