"""Building blocks that repeat: their stash, their bubbles, their pictures, and blocks in no paper.

In units of a full stage's F where TF = TI = TW; all comparisons are exact.
"""

from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.pipeline_parallel import controllable_memory, programs, validate
from minidist.pipeline_parallel.controllable_memory import BuildingBlock, offsets, repeated
from minidist.planning import simulate
from tests.pipeline_parallel.oracles import is_valid

STASH = {"v_half": lambda p: (p + 2) // 2, "v_min": lambda p: (p + 4) // 3}
SOME = [(p, m) for p in range(1, 9) for m in {1, 2, p // 2, p // 2 + 2, p, 2 * p, 3 * p} - {0}]
ALL = [(p, m) for p in range(1, 9) for m in range(1, 3 * p + 1)] + [(11, 12), (12, 30), (16, 20)]
grid = pytest.mark.parametrize("sizes", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
every_schedule = pytest.mark.parametrize("schedule", STASH)


@cache
def made(schedule, p, m):
    return programs(schedule, p, m)


@cache
def simulated(schedule, p, m):
    return simulate(made(schedule, p, m))


def idle(schedule, p, m, t):
    return simulate(made(schedule, p, m), *t).makespan - m * sum(t)


@every_schedule
def test_rank_r_has_the_stages_r_and_2p_less_1_less_r(schedule):
    for p in range(1, 5):
        found = made(schedule, p, 3).placement
        want = [[r, 2 * p - 1 - r] for r in range(p)]
        assert found == want, f"the placement is {found}, not a V: stages r and 2p - 1 - r"


@every_schedule
def test_no_two_passes_of_a_block_collide_however_many_ranks(schedule, monkeypatch):
    monkeypatch.setattr(controllable_memory, "repeated", lambda block, p, m: offsets(block, p))
    for p in range(1, 100):
        for own in getattr(controllable_memory, schedule)(p, 1):
            assert {at % 6 for at in own} == set(range(6)), (p, own)


@grid
@every_schedule
def test_the_stash_is_what_the_authors_say(schedule, sizes):
    for p, m in sizes:
        found, want = simulated(schedule, p, m).peak_stash, min(m, STASH[schedule](p))
        assert max(found) == want, (
            f"{schedule}, p = {p}, m = {m}: ranks stash {', '.join(map(str, found))} full stages "
            f"at their peaks, not {want} at most"
        )


@grid
@every_schedule
def test_the_idle_time_is_the_least_that_this_stash_allows(schedule, sizes):
    """Where m > stash; V-Min has 3/2 more where p mod 3 is 2."""
    for p, m in sizes:
        stash = STASH[schedule](p)
        want = 3 * (p - stash) - Fraction(1, 2) if p > 2 else Fraction(p - 1, 2)
        if schedule == "v_min" and p % 3 == 2:
            want = 3 * (p - stash) + 1
        found = simulated(schedule, p, m).makespan - 3 * m
        assert found == want or m <= stash, (
            f"{schedule}, p = {p}, m = {m}: ranks idle {found} units, not {want}"
        )


TIMES = [(3, 4, 2), (5, 6, 4), (2, 1, 2), (1, 1, 5), (4, 3, 2), (1, 2, 3), (1, 3, 2), (2, 3, 1)]


def test_v_half_idles_no_longer_for_more_micro_batches_and_v_min_does():
    """As in figure 5, which has (3, 4, 2). Its domain is the one on the authors' page."""
    for t, p in product(TIMES, range(2, 8)):
        f, i, w = t
        domain = 2 * i + w >= 2 * f and 2 * f + w >= 2 * i
        few, many = (idle("v_half", p, m, t) for m in (2 * p, 5 * p))
        assert (few == many) == domain, (
            f"v_half, p = {p}, (TF, TI, TW) = {t}: for {2 * p} micro-batches ranks idle {few} "
            f"units, and for {5 * p} they idle {many}"
        )
    assert idle("v_min", 4, 20, TIMES[0]) > idle("v_min", 4, 8, TIMES[0])


def row(signs):
    """Return a row of the docstring's pictures, from {unit of time: sign}."""
    return " ".join(signs.get(t, "-") for t in range(1 + int(max(signs))))


def test_the_pictures_in_the_docstring_are_the_block_and_the_programs():
    rows = [line[13:] for line in controllable_memory.__doc__.split("\n") if "   rank " in line]
    events = simulated("v_half", 3, 5).timeline.events
    for r, times in enumerate(offsets(BuildingBlock(2, 1, (2, 1, 1), 2), 3)):
        assert rows[r].partition("   ")[0] == row(dict(zip(times, "FfiIwW", strict=True)))
        done = {2 * e.start: e.name for e in events if e.rank == r}
        signs = {t: name[0].lower() if "." in name else name[0] for t, name in done.items()}
        assert rows[3 + r] == row(signs)


def needed(block, p):
    """Return how many passes of a chunk a rank holds between F and I, where blocks repeat."""
    return max(
        sum(t % 6 == now for f, i in ((f0, i0), (f1, i1)) for t in range(f, i + 1))
        for f0, f1, i1, i0, *_ in offsets(block, p)
        for now in range(6)
    )


@given(st.integers(1, 6), st.lists(st.integers(1, 7), min_size=5, max_size=5), st.data())
def test_any_block_makes_valid_programs_in_its_stash_which_idle_no_less_than_the_bound(
    p, times, data
):
    block = BuildingBlock(times[0], times[1], tuple(times[2:]), stash=0)
    try:
        least = -(-needed(block, p) // 2)
    except ValueError as error:
        assert "collide; change a turn" in str(error)
        return
    m, stash = data.draw(st.integers(1, 9)), least + data.draw(st.integers(0, 2))
    made = repeated(block._replace(stash=stash), p, m)
    validate(made, p, m)
    assert is_valid(made, m)
    found = simulate(made)
    last = found.peak_stash[-1]
    assert max(found.peak_stash) <= stash
    assert m <= last or found.makespan - 3 * m >= 3 * (p - last) - Fraction(1, 2)


def test_a_stash_that_is_too_small_and_a_wrong_turn_are_refused():
    with pytest.raises(
        ValueError, match=r"a stash of 1 is too small for BuildingBlock.* give it more"
    ):
        repeated(BuildingBlock(2, 1, (2, 1, 1), 1), 3, 5)
    with pytest.raises(ValueError, match=r"rank 0 has passes at .* collide; change a turn"):
        repeated(BuildingBlock(2, 1, (2, 1, 1), 3), 4, 5)


def test_the_widest_block_of_the_paper_waits_for_the_last_ranks_start_alone():
    """V-ZB: 4 units a step down, 2 a step up; the stash of 1F1B. `zb_v` promises the same."""
    for p, m in product(range(1, 9), (8, 12, 24)):
        found = simulate(repeated(BuildingBlock(4, 2, (1, 1, 1), stash=p), p, m))
        assert found.makespan - 3 * m == Fraction(p - 1, 2) and max(found.peak_stash) == p
