"""Tiles: every pair that attention may see is in one of them, and how many a rank computes."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.context_parallel import plain, tiles, zigzag
from minidist.context_parallel.tiles import computed_scores, document_tiles
from minidist.pieces import Positions
from tests.strategies import cut_sequences, windows


def pairs_of(queries, keys, documents, B):
    """Return how often each pair of a query and a key is computed and not hidden: [B, T, T]."""
    met = np.zeros((B, queries.length, keys.length), int)
    at, of = queries.indices, keys.indices
    for (_, examples, _, rows, _), (*_, columns, _), first in document_tiles(
        queries, keys, documents
    ):
        sees = np.tri(rows.stop - rows.start, columns.stop - columns.start, first, dtype=int)
        for i in range(B)[examples]:
            met[i][np.ix_(at[rows], of[columns])] += sees
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
    whole, cut = (
        pairs_per_rank(zigzag(T, N), [[(0, T)]], monkeypatch),
        pairs_per_rank(zigzag(T, N), documents, monkeypatch),
    )
    assert whole == [T * (T + 1) // 2 // N] * N
    assert sum(cut) == 60 * 61 // 2 + 6 * 6 * 7 // 2 and sum(cut) < sum(whole) / 2
    for held, work in ((zigzag(T, N), cut), (plain(T, N), None)):
        work = work or pairs_per_rank(held, documents, monkeypatch)
        mask = seen(T, documents, 1)[0]
        assert work == [int(mask[own.indices].sum()) for own in held]
    assert sum(cut) / (N * max(cut)) < 0.8


def test_one_query_in_one_tile_where_all_keys_are_at_hand():
    own, T = zigzag(300, 3)[1], 300
    met = [rows for (*_, rows, _), _, _ in document_tiles(own, Positions(((0, T),), T), None)]
    rows = [row for part in met for row in range(part.start, part.stop)]
    assert rows == list(range(len(own)))
