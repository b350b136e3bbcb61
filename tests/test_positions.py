"""Positions, and the layers that obey them: a part of a sequence is computed as on one device."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.pieces import Positions
from minidist.rng import Randomness
from tests.strategies import arrays, leaf, seeds

T = 7


@st.composite
def positions(draw, length=T, runs=2):
    """Draw up to two runs of neighbours, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, length), min_size=2 * runs, max_size=2 * runs)))
    return Positions(tuple(zip(ends[::2], ends[1::2], strict=True)), length)


@given(positions(runs=3))
def test_positions_are_their_runs_in_order(held):
    assert list(held.indices) == [t for a, b in held.runs for t in range(a, b)]
    assert len(held) == len(held.indices) and held.whole == (len(held) == T)
    assert all(a < b for a, b in held.runs)


@given(positions(), seeds)
def test_dropout_of_a_part_is_the_part_of_dropout(held, seed):
    x, drop = arrays(3, T, 4, seed=seed), nn.Dropout(0.5, name="d")
    tensor = leaf(3, T, 4, seed=seed)
    whole = drop(tensor, Randomness(1, 2, [4, 0, 9])).data
    part = Tensor(x[:, held.indices], requires_grad=True)
    own = drop(part, Randomness(1, 2, [4, 0, 9], positions=held))
    assert np.array_equal(own.data, whole[:, held.indices])


@given(positions(), seeds)
def test_an_embedding_looks_up_the_positions_that_it_is_told(held, seed):
    embedding = nn.TokenAndPosition(5, 3, T + 1, name="e", dtype="float64")
    tokens = np.random.default_rng(seed).integers(0, 5, (2, T))
    whole = embedding(tokens).data
    own = embedding(tokens[:, held.indices], Randomness(0, 0, [0, 1], positions=held)).data
    assert np.array_equal(own, whole[:, held.indices])


def at(*runs, length=T):
    return Randomness(0, 0, [0, 1], positions=Positions(runs, length))


REFUSED = [
    *[
        (partial(Positions, runs, T), "rise from 0 to 7")
        for runs in (((0, 8),), ((-1, 2),), ((3, 2),), ((0, 4), (2, 6)), ((4, 5), (0, 2)))
    ],
    (
        lambda: nn.TokenAndPosition(5, 3, 8, name="e")(np.zeros((2, 4), int), at((0, 3))),
        r"4 columns, at 3 positions .* tokens\[:, positions",
    ),
    (
        lambda: nn.TokenAndPosition(5, 3, 8, name="e")(np.zeros((2, 4), int), at((0, 4), length=9)),
        "a sequence of 9, in a context of 8",
    ),
    (
        lambda: nn.Transformer(5, 4, 2, 1, 8)(np.zeros((2, 3), int), at((0, 3), length=6)),
        r"sees 3 of 6 positions; .* ring_attention",
    ),
]


def test_positions_that_are_none_or_do_not_fit_are_refused():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call()
