"""What attention over ranks moves and computes in one layer: numbers alone, for any cut.

N ranks hold T_0, ..., T_(N-1) of T positions. Q or O has n bytes per position, for all examples and
heads, and one of K and V has kv: as many, or n / G where G query heads read one of them. Whole
steps of a model are in context_parallel.py.
"""

from collections.abc import Callable

from minidist.context_parallel.tiles import QUERIES
from minidist.pieces import Positions


def ring_bytes(sizes: list[int], n: int, kv: int | None = None) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    forward   every K, V but those of the next rank, which end here: 2 kv (T - T_(r+1))
    backward  K, V again; dK, dV of every rank but this one: 2 kv (T - T_r)
    All ranks together: 2 (N - 1) kv T forward, 4 (N - 1) kv T backward.
    """
    T, N, kv = sum(sizes), len(sizes), n if kv is None else kv
    forward = [2 * kv * (T - sizes[(r + 1) % N]) for r in range(N)]
    return [(sent, sent + 2 * kv * (T - own)) for sent, own in zip(forward, sizes, strict=True)]


def gathered_bytes(sizes: list[int], n: int, kv: int | None = None) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    forward   an all_gather of K, V: 2 (N - 1) kv T_r
    backward  a reduce_scatter of dK, dV: 2 kv (T - T_r)
    All ranks together: 2 (N - 1) kv T each way.
    """
    T, N, kv = sum(sizes), len(sizes), n if kv is None else kv
    return [(2 * (N - 1) * kv * own, 2 * kv * (T - own)) for own in sizes]


def ulysses_bytes(sizes: list[int], n: int, kv: int | None = None) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    To heads: its T_r positions of the heads of N - 1 others. To the sequence: T - T_r positions
    of its own heads. Forward Q, K, V go to the heads and O comes back; backward dO goes, and dQ,
    dK, dV come back. All ranks together: 2 (N - 1)/N (n + kv) T forward, and as much backward.

    kv  as it travels: with N > K the bytes of N heads
    """
    T, N, kv = sum(sizes), len(sizes), n if kv is None else kv
    there, back = [own * (N - 1) for own in sizes], [T - own for own in sizes]
    of_qkv, of_o = (n + 2 * kv) // N, n // N
    return [
        (a * of_qkv + b * of_o, a * of_o + b * of_qkv) for a, b in zip(there, back, strict=True)
    ]


def usp_bytes(
    sizes: list[int], n: int, kv: int | None = None, *, U: int, attention: Callable = ring_bytes
) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    Ulysses among U neighbours, and a ring of N/U groups, with K and V of K/U heads. All ranks
    together: 2 (U - 1)/U (n + kv) T forward, and as much backward; and 1, 2 times 2 (N/U - 1) kv T.

    attention  over the ring: ring_bytes or gathered_bytes
    """
    kv, groups = n if kv is None else kv, [sizes[r : r + U] for r in range(0, len(sizes), U)]
    heads = [sent for group in groups for sent in ulysses_bytes(group, n, kv)]
    ring = attention([sum(group) for group in groups], n // U, kv // U)
    return [(a + ring[r // U][0], b + ring[r // U][1]) for r, (a, b) in enumerate(heads)]


def ring_scores(held: Positions) -> int:
    """Return how many scores per head a rank computes in forward, with the hidden ones.

    A block of queries at positions below t meets t keys, on whatever ranks these are.
    """
    blocks = [(t, min(t + QUERIES, b)) for a, b in held.runs for t in range(a, b, QUERIES)]
    return sum((stop - start) * stop for start, stop in blocks)
