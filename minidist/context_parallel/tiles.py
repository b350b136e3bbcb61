"""Which blocks of scores a rank computes with the keys of another one: numbers, no arrays."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from minidist.pieces import Documents, Positions

QUERIES = 128  # that meet keys at once, so that scores take memory that grows with T, not T^2
Index = tuple  # into X[..., B, K, T, D]: (..., examples, all heads, positions, all of D)


def tiles(
    queries: Positions, keys: Positions, within: tuple[int, int] | None = None
) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows of Q, rows of K, first): blocks of queries, and the keys of a run they see.

    within  (first, last + 1) of the positions that are considered; None: all
    first   query i of the block sees the rows of K up to row first + i. Keys of another run are all
            earlier or all later than the block; if earlier, first is their number: none is hidden.
    """
    for row, a, b in placed(queries, within):
        for start in range(a, b, QUERIES):
            stop = min(start + QUERIES, b)
            for column, c, d in placed(keys, within):
                seen = min(d, stop) - c
                if seen > 0:
                    where = slice(row + start - a, row + stop - a)
                    yield where, slice(column, column + seen), min(start - c, seen)


def document_tiles(
    queries: Positions, keys: Positions, documents: Documents | None
) -> Iterator[tuple[Index, Index, int]]:
    """Yield (index of Q, index of K, first) of the tiles inside each document of each example.

    documents  (first, last + 1) of the documents of each example; None: every example is one
    """
    each: list = [(slice(None), [None])]  # examples, and the documents that they have
    if documents is not None:
        each = [(slice(i, i + 1), runs) for i, runs in enumerate(documents)]
    for examples, runs in each:
        before = ..., examples, slice(None)
        for document in runs:
            for rows, columns, first in tiles(queries, keys, document):
                yield (*before, rows, slice(None)), (*before, columns, slice(None)), first


def computed_scores(tiles_of_examples: Iterable[tuple[Index, Index, int]], B: int) -> int:
    """Return how many scores per head these tiles of B examples have, with the hidden ones."""
    scores = 0
    for (_, examples, _, rows, _), (*_, columns, _), _ in tiles_of_examples:
        block = (rows.stop - rows.start) * (columns.stop - columns.start)
        scores += block * len(range(B)[examples])
    return scores


def placed(held: Positions, within: tuple[int, int] | None = None) -> list[tuple[int, int, int]]:
    """Return (its first row, first position, last + 1) of what each run has of these positions."""
    rows = accumulate((b - a for a, b in held.runs), initial=0)
    start, stop = within or (0, held.length)
    runs = []
    for row, (a, b) in zip(rows, held.runs, strict=False):
        c, d = max(a, start), min(b, stop)
        if c < d:
            runs.append((row + c - a, c, d))
    return runs
