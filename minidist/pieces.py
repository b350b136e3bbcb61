"""How many things are cut into pieces, which positions a piece has, how many scores it computes.

Numbers alone: what plans and draws a cut, without an array, needs no NumPy.

Causal attention, O = P V with P = softmax(Q K^T / sqrt D) over positions s <= t, computes all T x T
scores of a head at once up to `WHOLE` positions, and a block of `BLOCK` queries at a time beyond.
autograd/attention.py does it, planning counts it.  Letters: T positions, D head width.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from minidist.errors import WrongInput

if TYPE_CHECKING:
    import numpy as np

WHOLE = 128  # positions; P is kept up to here, where a CPU takes longer to compute it again
BLOCK = 64  # positions of a block on a CPU, whose cache then holds a head's scores
GPU_BLOCK = 256  # on a GPU, where each block costs launches

Documents = list[list[tuple[int, int]]]  # of each example, (first, last + 1) of every document


def split_sizes(n: int, parts: int) -> list[int]:
    """Cut n things into sizes that differ by at most one, the larger first; some may be 0."""
    return [n // parts + (1 if part < n % parts else 0) for part in range(parts)]


def split_ends(n: int, parts: int) -> list[int]:
    """Return the parts + 1 bounds of the pieces: piece k is [ends[k], ends[k + 1])."""
    return [*accumulate(split_sizes(n, parts), initial=0)]


@dataclass(frozen=True)
class Positions:
    """Runs of neighbours among the positions 0 to `length` - 1 of a sequence, in rising order.

    runs  (first, last + 1) of each run; an empty run is left out
    """

    runs: tuple[tuple[int, int], ...]
    length: int

    def __post_init__(self):
        runs = tuple((a, b) for a, b in self.runs if a != b)
        ends = [end for run in runs for end in run]
        if ends != sorted(ends) or not all(0 <= end <= self.length for end in ends):
            raise WrongInput(
                f"runs of positions rise from 0 to {self.length} and do not overlap: {self.runs}"
            )
        object.__setattr__(self, "runs", runs)

    def __len__(self) -> int:
        return sum(b - a for a, b in self.runs)

    @property
    def whole(self) -> bool:
        return len(self) == self.length

    @property
    def indices(self) -> "np.ndarray":
        """The positions, int64 [T/N]."""
        import numpy as np  # here: all else in this file is numbers alone

        return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in self.runs)])


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


def prime_factors(n: int) -> tuple[int, ...]:
    """Return the prime factors, the largest first."""
    factors: tuple[int, ...] = ()
    k = 2
    while k * k <= n:
        while n % k == 0:
            factors, n = (k, *factors), n // k
        k += 1
    return (n, *factors) if n > 1 else factors
