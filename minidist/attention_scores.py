"""How many scores causal attention computes and keeps, per head: numbers, without arrays.

    O = P V,  P = softmax(Q K^T / sqrt D) over positions s <= t

autograd/attention.py computes all T x T scores at once up to `WHOLE` positions, and a block of
`BLOCK` queries at a time beyond; planning counts both.  Letters: T positions, D head width.
"""

WHOLE = 128  # positions; P is kept up to here, where a CPU takes longer to compute it again
BLOCK = 64  # positions of a block on a CPU, whose cache then holds a head's scores
GPU_BLOCK = 256  # on a GPU, where each block costs launches


def in_one_piece(T: int) -> bool:
    """Return whether all T x T scores of a head are computed at once, and P is kept."""
    return T <= WHOLE


def kept_scores(T: int) -> int:
    """Return how many numbers per head `causal_attention` keeps besides Q, K, V and O."""
    return T * T if in_one_piece(T) else T


def computed_scores(T: int) -> int:
    """Return how many scores per head its forward pass computes on a CPU, with the hidden ones."""
    return T * T if in_one_piece(T) else sum((b - a) * b for a, b in blocks(T, BLOCK))


def blocks(T: int, length: int) -> list[tuple[int, int]]:
    """Return each block's first position and the one after its last; the last may be shorter."""
    return [(a, min(a + length, T)) for a in range(0, T, length)]
