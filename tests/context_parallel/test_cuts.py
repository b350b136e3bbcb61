"""Cuts of a sequence: every position is on one rank, and zig-zag gives all the same work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.context_parallel import columns, plain, zigzag
from minidist.pieces import Positions
from tests.strategies import cut_sequences

both = pytest.mark.parametrize("cut", [plain, zigzag])


def scores(own):
    """Return how many keys the queries at these positions see."""
    return int(sum(t + 1 for t in own.indices))


@given(cut_sequences())
def test_every_position_is_on_exactly_one_rank(held):
    T = held[0].length
    assert sorted(t for own in held for t in own.indices) == list(range(T))
    assert all(own.length == T for own in held)


@both
@given(N=st.integers(1, 9), more=st.integers(0, 40))
def test_the_ranks_positions_differ_by_as_little_as_the_pieces_allow(cut, N, more):
    sizes = [len(own) for own in cut(N + more, N)]
    assert max(sizes) - min(sizes) <= (1 if cut is plain else 2) and min(sizes) >= 1


def test_zigzag_deals_2n_pieces_from_both_ends():
    assert zigzag(12, 3) == [
        Positions(((0, 2), (10, 12)), 12),
        Positions(((2, 4), (8, 10)), 12),
        Positions(((4, 6), (6, 8)), 12),
    ]
    assert zigzag(3, 3) == plain(3, 3)  # the second pieces are empty


@given(N=st.integers(1, 9), piece=st.integers(1, 9))
def test_zigzag_balances_causal_work_exactly_where_2n_divides_t(N, piece):
    T = 2 * N * piece
    assert {scores(own) for own in zigzag(T, N)} == {T * (T + 1) // (2 * N)}
    plainly = [scores(own) for own in plain(T, N)]  # in units of piece^2: 2 (2r + 1) and a half
    assert plainly == [4 * piece**2 * r + piece * (2 * piece + 1) for r in range(N)]


@both
def test_fewer_positions_than_ranks_are_refused(cut):
    with pytest.raises(ValueError, match="cannot cut 2 positions over 3 ranks; use at least 3"):
        cut(2, 3)


def test_columns_are_those_of_the_rank(place):
    x, held = place(np.arange(24).reshape(2, 12)), zigzag(12, 3)[0]
    assert columns(x, held).tolist() == [[0, 1, 10, 11], [12, 13, 22, 23]]
