"""Bytes that one layer over ranks sends: attention over a cut sequence, a block of a CNN.

For attention N ranks hold T_0, ..., T_(N-1) of T positions. Q or O has n bytes per position, for
all examples and heads, and one of K and V has kv: as many, or n / G where G query heads read one.
"""


def ring_bytes(sizes: list[int], n: int, kv: int | None = None) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    forward   every K, V but those of the next rank, which end here: 2 kv (T - T_(r+1))
    backward  K, V again; dK, dV of every rank but this one: 2 kv (T - T_r)
    All ranks together: 2 (N - 1) kv T forward, 4 (N - 1) kv T backward.
    """
    T, N, kv = sum(sizes), len(sizes), n if kv is None else kv
    forward = [2 * kv * (T - sizes[(r + 1) % N]) for r in range(N)]
    return [(sent, sent + 2 * kv * (T - T_r)) for sent, T_r in zip(forward, sizes, strict=True)]


def ulysses_bytes(sizes: list[int], n: int, kv: int | None = None) -> list[tuple[int, int]]:
    """Return the bytes that each rank sends in one layer's forward and backward.

    To heads: its T_r positions of the heads of N - 1 others. To the sequence: T - T_r positions
    of its own heads. Forward Q, K, V go to the heads and O comes back; backward dO goes, and dQ,
    dK, dV come back. All ranks together: 2 (N - 1)/N (n + kv) T forward, and as much backward.

    kv  as it travels: with N > K the bytes of N heads
    """
    T, N, kv = sum(sizes), len(sizes), n if kv is None else kv
    there, back = [T_r * (N - 1) for T_r in sizes], [T - T_r for T_r in sizes]
    of_qkv, of_o = (n + 2 * kv) // N, n // N
    return [
        (a * of_qkv + b * of_o, a * of_o + b * of_qkv) for a, b in zip(there, back, strict=True)
    ]


def block_bytes(B: int, C: int, H: int, W: int, itemsize: int, N: int) -> dict[str, int]:
    """Return {cut: bytes that all ranks send in forward and backward of a block of C channels}.

    channels  two all_reduces of X[B, C, H, W]
    halos     2 rows per border and convolution, both ways
    weights   an all_reduce of two convolutions' gradients, where rows are split
    """
    return {
        "channels": 2 * 2 * (N - 1) * B * C * H * W * itemsize,
        "halos": 2 * 2 * 2 * (N - 1) * B * C * W * itemsize,
        "weights": 2 * (N - 1) * 2 * 9 * C * C * itemsize,
    }
