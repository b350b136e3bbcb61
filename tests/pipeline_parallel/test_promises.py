"""What the papers and docstrings of schedules promise: idle times, stash, orders and pictures.

TF, TI, TW: times of the forward pass and of the two halves of the backward pass of a stage. All
numbers are whole or Fractions and all comparisons are exact. Where a formula has a domain, ranks
idle longer elsewhere.
"""

from fractions import Fraction
from functools import cache
from itertools import groupby, product
from operator import eq, ge, gt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.pipeline_parallel import (
    controllable_memory,
    dualpipe_v,
    interleaved_zb,
    looped_bfs,
    programs,
    validate,
)
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward
from minidist.pipeline_parallel.controllable_memory import BuildingBlock, offsets, repeated
from minidist.pipeline_parallel.zero_bubble import v_shaped
from minidist.planning import simulate
from tests.pipeline_parallel.oracles import ends, is_valid

TIMES = [*product((1, 2, 3), repeat=3), (5, 1, 3), (7, 5, 6)]
TIMES += [(Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)), (1, 9, 9)]
SOME = [(1, 1, 1), (3, 1, 2), (7, 5, 6)]  # where a formula knows their sum alone
FEW = [1, 2, 3, 4]
ranks = pytest.mark.parametrize("ps", [FEW, pytest.param(range(1, 9), marks=pytest.mark.slow)])

made = cache(programs)


def once(p):
    return (1, 2, 5, 9)


def rounds(p):
    return (p, 3 * p)


def two_chunks_in_time(p):
    return (2 * p, 2 * p + 1, 2 * p + 5)


IDLE = {  # schedule: numbers of micro-batches, of chunks, times; (p, m, v, F, I, W) -> idle
    "layer_split": (once, [1], SOME, lambda p, m, v, f, i, w: ((p - 1) * m * (f + i + w), eq)),
    "gpipe": (once, [1], SOME, lambda p, m, v, f, i, w: ((p - 1) * (f + i + w), eq)),
    "1f1b": (once, [1], SOME, lambda p, m, v, f, i, w: ((p - 1) * (f + i + w), eq)),
    "interleaved": (
        rounds,
        [1, 2, 3],
        SOME,
        lambda p, m, v, f, i, w: (Fraction(p - 1, v) * (f + i + w), eq),
    ),
    "looped_bfs": (  # as interleaved, but for turns that wait for more micro-batches
        once,
        [1, 2, 3],
        SOME,
        lambda p, m, v, f, i, w: (
            Fraction((p - 1) + (v - 1) * max(0, p - m), v) * (f + i + w),
            eq,
        ),
    ),
    "zb_h1": (
        once,
        [1],
        TIMES,
        lambda p, m, v, f, i, w: (
            (p - 1) * (f + i - w),
            eq if p == 1 or (m >= p and w <= min(f, i)) else gt,
        ),
    ),
    "interleaved_zb": (
        rounds,
        [1, 2, 3],
        TIMES,
        lambda p, m, v, f, i, w: (
            Fraction(p - 1) * (f + i - w) / v,
            eq if p == 1 or w <= min(f, i) else gt,
        ),
    ),
    "dualpipe_v": (  # where pairs run one after the other
        two_chunks_in_time,
        [1],
        TIMES,
        lambda p, m, v, f, i, w: (
            Fraction(p - 1) * (f + i - w) / 2,
            eq if w <= i <= f <= i + w or p == 1 else ge if p < 4 else gt,
        ),
    ),
}


@ranks
@pytest.mark.parametrize("schedule", IDLE)
def test_every_rank_idles_by_the_formula_and_longer_outside_of_its_domain(schedule, ps):
    numbers, chunks, times, formula = IDLE[schedule]
    for p, v, t in product(ps, chunks, times):
        for m in numbers(p):
            found, (want, relation) = simulate(made(schedule, p, m, v), *t), formula(p, m, v, *t)
            idle = found.makespan - m * sum(t)
            assert found.busy == [m * sum(t)] * p
            assert found.bubble == 1 - Fraction(m * sum(t)) / found.makespan
            assert relation(idle, want), (
                f"{schedule}, p = {p}, m = {m}, {v} chunks, (TF, TI, TW) = {t}: every rank idles "
                f"{idle} units; by the formula {'' if relation is eq else 'more than '}{want}"
            )


STASH = {  # schedule: numbers of micro-batches, of chunks; (p, m, v, rank) -> stages in flight
    "layer_split": (once, [1], lambda p, m, v, r: 1),
    "gpipe": (once, [1], lambda p, m, v, r: m),
    "1f1b": (once, [1], lambda p, m, v, r: min(m, p - r)),
    "zb_h1": (once, [1], lambda p, m, v, r: min(m, p)),
    "zb_h2": (once, [1], lambda p, m, v, r: min(m, 2 * p - 1)),
    "zb_v": (once, [1], lambda p, m, v, r: min(m, p, Fraction(m + 1 + r, 2))),
    "pipedream": (once, [1], lambda p, m, v, r: min(m, p - r)),
    "pipedream_2bw": (once, [1], lambda p, m, v, r: min(m, p - r)),
    "looped_bfs": (once, [1, 2, 3], lambda p, m, v, r: m),
    "interleaved": (
        rounds,
        [1, 2, 3],
        lambda p, m, v, r: Fraction(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1), v),
    ),
    "interleaved_zb": (rounds, [1, 2, 3], lambda p, m, v, r: p),
    "dualpipe_v": (two_chunks_in_time, [1], lambda p, m, v, r: p + Fraction(1, 2)),
}


@ranks
@pytest.mark.parametrize("schedule", STASH)
def test_the_stash_has_a_closed_form(schedule, ps):
    numbers, chunks, formula = STASH[schedule]
    for p, v in product(ps, chunks):
        for m in numbers(p):
            found = simulate(made(schedule, p, m, v), 2, 1, 3).peak_stash
            want = [formula(p, m, v, r) for r in range(p)]
            assert found == want, (
                f"{schedule}, p = {p}, m = {m}, {v} chunks: ranks stash "
                f"{', '.join(map(str, found))} stages at their peaks, not {want}"
            )


def test_weights_put_last_cost_the_stash_of_all_micro_batches():
    for schedule, p, m in product(("1f1b", "zb_h1", "zb_v"), FEW, (1, 4, 6)):
        assert simulate(programs(schedule, p, m, weights_last=True)).peak_stash == [m] * p


def test_zb_h2_idles_by_the_formula_in_its_span_where_m_is_2p_less_1_and_w_is_no_longer_than_f():
    """Its domain: m >= 2p - 1, TW <= TF, 2 TW <= TF + TI; outside of it the span is longer."""
    for p, m, t in product(FEW[1:], (1, 3, 5, 7, 9), TIMES):
        f, i, w = t
        found = simulate(made("zb_h2", p, m), *t)
        formula = (p - 1) * (f + i - 2 * w)
        domain = m >= 2 * p - 1 and w <= f and 2 * w <= f + i
        assert (found.span - found.busy[0] == formula) == domain, (p, m, t)
        assert found.span - found.busy[0] >= formula
        if domain and f == i == w:
            assert found.span_bubble == 0 and found.makespan == found.span + (p - 1) * f


def test_zb_v_has_no_bubble_where_all_three_take_the_same_time_and_m_is_2p_less_1():
    for p, m in product(FEW[1:], range(1, 9)):
        found = simulate(programs("zb_v", p, m), *[Fraction(2, 3)] * 3)
        assert (found.span_bubble == 0) == (m >= 2 * p - 1), (p, m)
        if m >= 2 * p - 1:  # the last rank starts after p - 1 chunks' forwards
            assert found.makespan - found.span == (p - 1) * Fraction(1, 3)
    assert simulate(programs("zb_v", 3, 9), 2, 1, 1).span_bubble > 0


@ranks
def test_a_chunk_works_in_one_piece_once_forward_and_once_backward(ps):
    """So it gathers sharded weights twice, and its gradient is complete before the next begins."""
    for p, m, v in product(ps, (1, 2, 5), (1, 2, 3)):
        want = [(Forward, c) for c in range(v)] + [(Backward, c) for c in reversed(range(v))]
        for r, program in enumerate(made("looped_bfs", p, m, v)):
            pieces = [piece for piece, _ in groupby((type(a), a.chunk) for a in program)]
            assert pieces == want, (
                f"p = {p}, m = {m}, {v} chunks: rank {r} works in {len(pieces)} pieces, not in "
                f"{2 * v}: one forward and one backward per chunk, the last chunk's backward first"
            )


def passes(program, *kinds):
    return [(a.micro_batch, a.chunk) for a in program if type(a) in kinds]


@ranks
def test_every_weight_half_is_after_its_input_half_and_as_many_passes_late_as_the_rank_says(ps):
    for p, turns, v in product(ps, (1, 2), (1, 2, 3)):
        m = turns * p
        plain = made("interleaved", p, m, v)
        for r, program in enumerate(made("interleaved_zb", p, m, v)):
            assert passes(program, Forward) == passes(plain[r], Forward)
            assert passes(program, BackwardInput) == passes(plain[r], Backward)
            weights = passes(program, BackwardWeight)
            assert passes(program, BackwardInput) == weights
            for number, (i, c) in enumerate(weights):
                before = program[: program.index(BackwardWeight(i, c))]
                done, want = len(passes(before, BackwardInput)), min(number + 1 + r, len(weights))
                assert done == want, (
                    f"p = {p}, {v} chunks, rank {r}: W{i}.{c} comes after {done} input halves, not "
                    f"after {want}: its own, and those of {r} passes more while there are any"
                )


@ranks
def test_pairs_are_of_two_chunks_and_all_but_the_first_and_last_passes_are_in_one(ps):
    for p, more in product(ps, (0, 1, 5)):
        found = made("dualpipe_v", p, 2 * p + more)
        validate(found, p, 2 * p + more)
        placement = found.placement
        assert placement == v_shaped(p), f"chunks are stages {placement}, not r and 2p - 1 - r"
        for r in range(p):
            pairs = [(f, b) for rank, f, b in found.pairs if rank == r]
            assert all(f.chunk != b.chunk for f, b in pairs)
            want = 2 * (more + r + 1) + (p - 1 - r) - (r == p - 1)
            assert len(pairs) == want, (
                f"p = {p}, m = {2 * p + more}: rank {r} has {len(pairs)} pairs, not {want}: on the "
                "last rank the first backward, for which all wait, is no part of one"
            )


@ranks
def test_dualpipe_v_has_the_bubble_its_authors_say_where_pairs_run_at_once(ps):
    """(PP/2 - 1)(F&B + B - 3W) on the last rank, for PP = 2p chunks, F = B - W and W <= F.

    It is longer than above even for F&B = F + B, because both results of a pair leave at its end.
    """
    for p, more, f in product(ps, (0, 3), (1, 3)):
        for w, saved in product({1, f}, {0, f}):
            found, b = made("dualpipe_v", p, 2 * p + more), f + w
            times, pair = {"F": f, "B": b, "I": f, "W": w}, f + b - saved
            end = max(ends(found, lambda r, a, times=times: times[a.sign], pair=pair).values())
            busy = sum(times[a.sign] for a in found[-1])
            busy -= saved * sum(r == p - 1 for r, *_ in found.pairs)
            bubble, formula = end - busy, (p - 1) * (pair + b - 3 * w)
            assert bubble == formula, (
                f"p = {p}, m = {2 * p + more}, F = {f}, B = {b}, W = {w}, F&B = {pair}: a bubble "
                f"of {bubble}, not (p - 1)(F&B + B - 3W) = {formula}"
            )


def in_docstring(module):
    """Return the rows of the picture in a module's docstring."""
    return [line[13:].rstrip() for line in module.__doc__.split("\n") if line[4:9] == "rank "]


def drawn(made, *durations):
    """Return a row per rank: three columns per unit of time, "&" between the two of a pair."""
    forwards = {(rank, str(forward)) for rank, forward, _ in made.pairs}
    rows = [""] * len(made)
    for e in sorted(simulate(made, *durations).timeline.events, key=lambda e: e.start):
        name, _, chunk = e.name.partition(".")
        name = name.lower() if chunk else name
        start, width = (int(3 * time) for time in (e.start, e.seconds))
        cell = name.ljust(width - 1, "-") + ("&" if (e.rank, e.name) in forwards else "")
        rows[e.rank] = rows[e.rank].ljust(start) + cell
    return rows


def test_the_pictures_in_the_docstrings_are_the_programs():
    assert in_docstring(looped_bfs) == drawn(made("looped_bfs", 2, 3, 2), 2, 1, 1)
    assert in_docstring(interleaved_zb) == drawn(made("interleaved_zb", 2, 2, 2), 2, 2, 2)
    assert in_docstring(dualpipe_v) == drawn(made("dualpipe_v", 2, 4), 2, 2, 2)


def test_one_chunk_is_the_schedule_without_chunks():
    assert made("looped_bfs", 3, 5) == made("gpipe", 3, 5)
    assert made("interleaved_zb", 3, 6) == made("zb_h1", 3, 6)


# Building blocks that repeat (controllable memory). In units of F, where TF = TI = TW.

MOST = {"v_half": lambda p: (p + 2) // 2, "v_min": lambda p: (p + 4) // 3}
SIZES = [(p, m) for p in range(1, 9) for m in {1, p // 2 + 2, p, 3 * p}]
every_block = pytest.mark.parametrize("schedule", MOST)


@every_block
def test_rank_r_has_the_stages_r_and_2p_less_1_less_r(schedule):
    for p in range(1, 5):
        found = made(schedule, p, 3).placement
        want = [[r, 2 * p - 1 - r] for r in range(p)]
        assert found == want, f"the placement is {found}, not a V: stages r and 2p - 1 - r"


@every_block
def test_the_stash_is_what_the_authors_say(schedule):
    for p, m in SIZES:
        found = simulate(made(schedule, p, m)).peak_stash
        want = min(m, MOST[schedule](p))
        assert max(found) == want, (
            f"{schedule}, p = {p}, m = {m}: ranks stash {', '.join(map(str, found))} full stages "
            f"at their peaks, not {want} at most"
        )


@every_block
def test_the_idle_time_is_the_least_that_this_stash_allows(schedule):
    """Where m > stash; V-Min has 3/2 more where p mod 3 is 2."""
    for p, m in SIZES:
        stash = MOST[schedule](p)
        want = 3 * (p - stash) - Fraction(1, 2) if p > 2 else Fraction(p - 1, 2)
        if schedule == "v_min" and p % 3 == 2:
            want = 3 * (p - stash) + 1
        found = simulate(made(schedule, p, m)).makespan - 3 * m
        assert found == want or m <= stash, (
            f"{schedule}, p = {p}, m = {m}: ranks idle {found} units, not {want}"
        )


def test_v_half_idles_no_longer_for_more_micro_batches_and_v_min_does():
    """As in figure 5, which has (3, 4, 2). Its domain is the one on the authors' page."""

    def idle(schedule, p, m, t):
        return simulate(made(schedule, p, m), *t).makespan - m * sum(t)

    for t, p in product([(3, 4, 2), (5, 6, 4), (2, 1, 2), (1, 1, 5), (1, 2, 3), (2, 3, 1)], (2, 5)):
        f, i, w = t
        domain = 2 * i + w >= 2 * f and 2 * f + w >= 2 * i
        few, many = (idle("v_half", p, m, t) for m in (2 * p, 5 * p))
        assert (few == many) == domain, (
            f"v_half, p = {p}, (TF, TI, TW) = {t}: for {2 * p} micro-batches ranks idle {few} "
            f"units, and for {5 * p} they idle {many}"
        )
    assert idle("v_min", 4, 20, (3, 4, 2)) > idle("v_min", 4, 8, (3, 4, 2))


def test_the_pictures_of_a_block_are_the_block_and_the_programs():
    def row(signs):
        return " ".join(signs.get(t, "-") for t in range(1 + int(max(signs))))

    rows = [line[13:] for line in controllable_memory.__doc__.split("\n") if "   rank " in line]
    events = simulate(made("v_half", 3, 5)).timeline.events
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


def test_the_widest_block_of_the_paper_waits_for_the_last_ranks_start_alone():
    """V-ZB: 4 units a step down, 2 a step up; the stash of 1F1B. `zb_v` promises the same."""
    for p, m in product(range(1, 7), (8, 24)):
        found = simulate(repeated(BuildingBlock(4, 2, (1, 1, 1), stash=p), p, m))
        assert found.makespan - 3 * m == Fraction(p - 1, 2) and max(found.peak_stash) == p
