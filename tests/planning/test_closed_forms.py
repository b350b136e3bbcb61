"""What the simulator finds of the schedules is what their papers' formulas say, exactly.

TF, TI, TW: times of the forward pass and of the two halves of the backward pass of a stage. All
numbers are whole or Fractions and all comparisons are ==. Where a formula has a domain, it is the
test's.
"""

from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from minidist.pipeline_parallel import programs
from minidist.planning import simulate

PARTS = Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)
DURATIONS = [*product((1, 2, 3), repeat=3), PARTS, (5, 1, 3), (7, 5, 6), (1, 9, 9)]
SOME = [(1, 1, 1), (3, 1, 2), PARTS, (7, 5, 6)]  # where a formula knows their sum alone
P, M = range(1, 7), (1, 2, 3, 4, 5, 6, 7, 9, 12)


made = cache(programs)


def idle(schedule, p, m, t, chunks=1):
    """Return the time per rank in which it does not compute; it is the same on every rank."""
    found = simulate(made(schedule, p, m, chunks), *t)
    assert set(found.busy) == {m * sum(t)}
    assert found.bubble == 1 - Fraction(m * sum(t)) / found.makespan
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
    for p, rounds, v, t in product(P, (1, 2, 3), (1, 2, 3), SOME):
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
        found = simulate(made("zb_h2", p, m), *t)
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
