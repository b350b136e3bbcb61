"""Which blocks of scores a rank computes with the keys of another one: numbers, no arrays."""

from collections.abc import Iterator
from itertools import accumulate

from minidist.pieces import Positions

QUERIES = 128  # that meet keys at once, so that scores take memory that grows with T, not T^2


def tiles(queries: Positions, keys: Positions) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows of Q, rows of K, first): blocks of queries, and the keys of a run they see.

    first  the row of K up to which all of these queries see; query i sees i more. It is all rows
           unless both are of the same run, because two ranks hold no position in common.
    """
    for rows, a, b in placed(queries):
        for start in range(a, b, QUERIES):
            stop = min(start + QUERIES, b)
            for columns, c, d in placed(keys):
                seen = min(d, stop) - c
                if seen > 0:
                    where = slice(rows + start - a, rows + stop - a)
                    yield where, slice(columns, columns + seen), min(start - c, seen)


def placed(held: Positions) -> list[tuple[int, int, int]]:
    """Return (its first row, first position, last + 1) of each run."""
    rows = accumulate((b - a for a, b in held.runs), initial=0)
    return [(row, a, b) for row, (a, b) in zip(rows, held.runs, strict=False)]
