"""What attention over ranks moves and computes in one layer: numbers alone, for any cut.

N ranks hold T_0, ..., T_(N-1) of T positions. One of Q, K, V or O has n bytes per position, for all
examples and heads. Whole steps of a model are in context_parallel.py.
"""

from minidist.context_parallel.tiles import QUERIES
from minidist.pieces import Positions


def ring_bytes(sizes: list[int], n: int) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    forward   every K, V but those of the next rank, which end here: 2 n (T - T_(r+1))
    backward  K, V again; dK, dV of every rank but this one: 2 n (T - T_r)
    All ranks together: 2 (N - 1) n T forward, 4 (N - 1) n T backward.
    """
    T, N = sum(sizes), len(sizes)
    forward = [2 * n * (T - sizes[(r + 1) % N]) for r in range(N)]
    return [(sent, sent + 2 * n * (T - own)) for sent, own in zip(forward, sizes, strict=True)]


def ulysses_bytes(sizes: list[int], n: int) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    To heads: its T_r positions of the heads of N - 1 others. To the sequence: T - T_r positions
    of its own heads. Forward Q, K, V go to the heads and O comes back; backward dO goes, and dQ,
    dK, dV come back. All ranks together: 4 (N - 1)/N n T forward, and as much backward.
    """
    T, N = sum(sizes), len(sizes)
    there, back = [own * (N - 1) * n // N for own in sizes], [(T - own) * n // N for own in sizes]
    return [(3 * a + b, a + 3 * b) for a, b in zip(there, back, strict=True)]


def ring_scores(held: Positions) -> int:
    """Return how many scores per head a rank computes in forward, with the hidden ones.

    A block of queries at positions below t meets t keys, on whatever ranks these are.
    """
    blocks = [(t, min(t + QUERIES, b)) for a, b in held.runs for t in range(a, b, QUERIES)]
    return sum((stop - start) * stop for start, stop in blocks)
