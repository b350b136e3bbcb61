"""Cuts of a sequence: every position is on one rank, and zig-zag gives all the same work. Tiles:
every pair that attention may see is in one of them.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.context_parallel import axes_of, columns, plain, tiles, zigzag
from minidist.context_parallel.cuts import union
from minidist.context_parallel.tiles import computed_scores, document_tiles
from minidist.pieces import Positions
from tests.strategies import cut_sequences, windows

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


def members(group, U):
    return [g.all_gather(np.array([group.rank]), label="who").tolist() for g in axes_of(group, U)]


def test_neighbours_exchange_heads_and_every_uth_rank_is_in_a_ring(cluster):
    found = cluster(6, "thread").run(members, 2)
    assert [heads for heads, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [ring for _, ring in found] == [[0, 2, 4], [1, 3, 5]] * 3


def test_groups_of_neighbours_hold_the_zigzag_of_the_groups():
    """So every rank of a ring has as much to compute as with one rank in a group's place."""
    held, groups = zigzag(48, 8), zigzag(48, 4)
    assert [union(held[r : r + 2]) for r in range(0, 8, 2)] == [union([own]) for own in groups]
    assert union(plain(13, 4)) == plain(13, 1)[0]


def pairs_of(queries, keys, documents, B):
    """Return how often each pair of a query and a key is computed and not hidden: [B, T, T]."""
    met = np.zeros((B, queries.length, keys.length), int)
    at, of = queries.indices, keys.indices
    for (_, examples, _, rows, _), (*_, seen_rows, _), first in document_tiles(
        queries, keys, documents
    ):
        sees = np.tri(rows.stop - rows.start, seen_rows.stop - seen_rows.start, first, dtype=int)
        for i in range(B)[examples]:
            met[i][np.ix_(at[rows], of[seen_rows])] += sees
    return met


def seen(T, documents, B):
    """Return which keys each query may see, [B, T, T]."""
    mask = np.zeros((B, T, T), int)
    for i, runs in enumerate(documents or [[(0, T)]] * B):
        for a, b in runs:
            mask[i, a:b, a:b] = np.tri(b - a, dtype=int)
    return mask


@given(
    data=st.data(), held=cut_sequences(), B=st.integers(1, 2), block=st.sampled_from([1, 3, 128])
)
def test_the_tiles_of_all_ranks_hold_every_pair_that_is_seen_once(data, held, B, block):
    documents = data.draw(windows(held[0].length, B))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERIES", block)
        met = sum(pairs_of(a, b, documents, B) for a, b in product(held, held))
    assert np.array_equal(met, seen(held[0].length, documents, B))


def pairs_per_rank(held, documents, monkeypatch):
    """Return how many pairs each rank computes, of one head and one window."""
    monkeypatch.setattr(tiles, "QUERIES", 1)  # then no score is hidden
    T = held[0].length
    whole = Positions(((0, T),), T)
    return [computed_scores(document_tiles(own, whole, documents), 1) for own in held]


def test_documents_take_work_away_and_zigzag_no_longer_balances_it(monkeypatch):
    """A long document among short ones: whoever holds its end waits for nobody."""
    T, N, documents = 96, 4, [[(0, 60), *((t, t + 6) for t in range(60, 96, 6))]]
    assert pairs_per_rank(zigzag(T, N), [[(0, T)]], monkeypatch) == [T * (T + 1) // 2 // N] * N
    mask = seen(T, documents, 1)[0]
    for cut in zigzag, plain:
        work = pairs_per_rank(cut(T, N), documents, monkeypatch)
        assert work == [int(mask[own.indices].sum()) for own in cut(T, N)]
        assert sum(work) / (N * max(work)) < 0.8
