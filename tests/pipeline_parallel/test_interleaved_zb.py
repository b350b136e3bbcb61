"""Interleaved zero bubble: the rule of ZB-H1 for passes of chunks."""

from fractions import Fraction
from itertools import product
from operator import eq, gt

import pytest

from minidist.pipeline_parallel import interleaved_zb, programs, validate
from minidist.pipeline_parallel.actions import BackwardInput, BackwardWeight, Forward
from tests.pipeline_parallel.promises import assert_idles, assert_stash, drawn, in_docstring, ranks
from tests.planning.test_closed_forms import DURATIONS, made
from tests.planted import planted


@ranks
def test_every_weight_half_is_after_its_input_half_and_as_many_passes_late_as_the_rank_says(ps):
    for p, rounds, v in product(ps, (1, 2), (1, 2, 3)):
        for r, program in enumerate(made("interleaved_zb", p, rounds * p, v)):
            inputs, weights = (
                [(a.micro_batch, a.chunk) for a in program if type(a) is kind]
                for kind in (BackwardInput, BackwardWeight)
            )
            assert inputs == weights
            for number, (i, c) in enumerate(weights):
                before = program[: program.index(BackwardWeight(i, c))]
                done = sum(type(a) is BackwardInput for a in before)
                want = min(number + 1 + r, len(inputs))
                assert done == want, (
                    f"p = {p}, {v} chunks, rank {r}: W{i}.{c} comes after {done} input halves, not "
                    f"after {want}: its own, and those of {r} passes more while there are any"
                )


def test_forwards_and_backwards_are_in_the_order_of_interleaved():
    def orders(program):
        """Return the passes of (all forwards, all backwards)."""
        passes = [a for a in program if type(a) is not BackwardWeight]
        return [
            [(a.micro_batch, a.chunk) for a in passes if (type(a) is Forward) == forward]
            for forward in (True, False)
        ]

    for p, v in product((1, 2, 3, 4), (2, 3)):
        pairs = zip(
            made("interleaved_zb", p, 2 * p, v), made("interleaved", p, 2 * p, v), strict=True
        )
        assert all(orders(ours) == orders(theirs) for ours, theirs in pairs)


@ranks
def test_it_divides_the_bubble_of_zb_h1_by_the_chunks_where_w_is_the_shortest(ps):
    """And only there: elsewhere it idles longer."""
    for p, rounds, v, t in product(ps[1:], (1, 2), (1, 2, 3), DURATIONS):
        f, i, w = t
        relation = eq if w <= min(f, i) else gt
        formula = Fraction(p - 1) * (f + i - w) / v
        assert_idles("interleaved_zb", p, rounds * p, t, formula, v, relation)


@ranks
def test_every_rank_stashes_a_stage_per_rank(ps):
    for p, rounds, v in product(ps, (1, 2, 3), (1, 2, 3)):
        assert_stash("interleaved_zb", p, rounds * p, p, v)


def test_weight_halves_in_the_order_of_forwards_come_before_their_input_halves():
    with planted("interleaved_zb_weights_in_forwards_order"):
        wrong = programs("interleaved_zb", 2, 2, 2)
    with pytest.raises(ValueError, match=r"W0 must come after F and I of its .*, not after F"):
        validate(wrong, 2, 2)


def test_one_chunk_is_zb_h1():
    assert made("interleaved_zb", 3, 6) == made("zb_h1", 3, 6)


def test_the_picture_is_the_program():
    assert in_docstring(interleaved_zb) == drawn(made("interleaved_zb", 2, 2, 2), 2, 2, 2)
