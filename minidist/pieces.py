"""How many things are cut into pieces, and which positions of a sequence a piece has.

Numbers alone: what plans and draws a cut, without an array, needs no NumPy.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from minidist.errors import WrongInput

if TYPE_CHECKING:
    import numpy as np

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
