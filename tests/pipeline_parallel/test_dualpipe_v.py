"""DualPipe-V: which passes are pairs; bubbles where a pair runs at once, and where it does not."""

from fractions import Fraction
from itertools import product
from operator import eq, ge, gt

from minidist.pipeline_parallel import dualpipe_v, validate
from minidist.pipeline_parallel.zero_bubble import v_shaped
from tests.pipeline_parallel.oracles import ends
from tests.pipeline_parallel.promises import assert_idles, assert_stash, drawn, in_docstring, ranks
from tests.planning.test_closed_forms import DURATIONS, made


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
def test_it_idles_by_the_formula_where_pairs_run_one_after_the_other(ps):
    """Its domain: TW <= TI <= TF <= TB; outside of it, from 4 ranks on, longer."""
    for p, more, t in product(ps, (0, 1, 5), DURATIONS):
        f, i, w = t
        relation = eq if w <= i <= f <= i + w or p == 1 else ge if p < 4 else gt
        formula = Fraction(p - 1) * (f + i - w) / 2
        assert_idles("dualpipe_v", p, 2 * p + more, t, formula, relation=relation)


@ranks
def test_it_has_the_bubble_its_authors_say_where_pairs_run_at_once(ps):
    """(PP/2 - 1)(F&B + B - 3W) on the last rank, for PP = 2p chunks, F = B - W and W <= F.

    It is longer than above even for F&B = F + B, because both results of a pair leave at its end.
    """
    for p, more, f in product(ps, (0, 3), (1, 2, 3)):
        for w, saved in product(range(1, f + 1), range(f + 1)):
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


@ranks
def test_every_rank_stashes_a_chunk_more_than_a_stage_per_rank(ps):
    for p, more in product(ps, (0, 1, 2, 7)):
        assert_stash("dualpipe_v", p, 2 * p + more, p + Fraction(1, 2))


def test_the_picture_is_the_program():
    assert in_docstring(dualpipe_v) == drawn(made("dualpipe_v", 2, 4), 2, 2, 2)
