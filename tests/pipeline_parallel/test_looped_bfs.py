"""Breadth-first: a chunk works in one piece, at the price of a stash of all micro-batches."""

from fractions import Fraction
from itertools import groupby, product

from minidist.pipeline_parallel import looped_bfs
from minidist.pipeline_parallel.actions import Backward, Forward
from tests.pipeline_parallel.promises import assert_idles, assert_stash, drawn, in_docstring, ranks
from tests.planning.test_closed_forms import SOME, M, made


@ranks
def test_a_chunk_works_in_one_piece_once_forward_and_once_backward(ps):
    """So it gathers sharded weights twice, and its gradient is complete before the next begins."""
    for p, m, v in product(ps, (1, 2, 5, 8), (1, 2, 3)):
        want = [(Forward, c) for c in range(v)] + [(Backward, c) for c in reversed(range(v))]
        for r, program in enumerate(made("looped_bfs", p, m, v)):
            pieces = [piece for piece, _ in groupby((type(a), a.chunk) for a in program)]
            assert pieces == want, (
                f"p = {p}, m = {m}, {v} chunks: rank {r} works in {len(pieces)} pieces, not in "
                f"{2 * v}: one forward and one backward per chunk, the last chunk's backward first"
            )


@ranks
def test_it_idles_as_interleaved_but_for_turns_that_wait_for_more_micro_batches(ps):
    for p, m, v, t in product(ps, M, (1, 2, 3), SOME):
        waits = (p - 1) + (v - 1) * max(0, p - m)
        assert_idles("looped_bfs", p, m, t, Fraction(waits, v) * sum(t), v)


@ranks
def test_it_stashes_all_micro_batches(ps):
    for p, m, v in product(ps, (1, 3, 8), (1, 2, 3)):
        assert_stash("looped_bfs", p, m, m, v)


def test_one_chunk_is_gpipe():
    assert made("looped_bfs", 3, 5) == made("gpipe", 3, 5)


def test_the_picture_is_the_program():
    assert in_docstring(looped_bfs) == drawn(made("looped_bfs", 2, 3, 2), 2, 1, 1)
