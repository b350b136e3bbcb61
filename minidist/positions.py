"""Which positions of a sequence a rank holds, if the sequence is cut over ranks."""

from dataclasses import dataclass

import numpy as np


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
            raise ValueError(
                f"runs of positions rise from 0 to {self.length} and do not overlap: {self.runs}"
            )
        object.__setattr__(self, "runs", runs)

    def __len__(self) -> int:
        return sum(b - a for a, b in self.runs)

    @property
    def whole(self) -> bool:
        return len(self) == self.length

    @property
    def indices(self) -> np.ndarray:
        """The positions, int64 [T/N]."""
        return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in self.runs)])
