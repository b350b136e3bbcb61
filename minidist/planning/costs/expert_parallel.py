"""What experts over ranks move and hold, given which expert each row goes to.

The weights decide it: `drawn` runs the model on one device, and returns the load of each expert.
Letters: N ranks, r one of them; E experts, rank r holds a run of them.
"""

from itertools import pairwise

import numpy as np

from minidist.pieces import split_ends
from minidist.planning.costs.cost import (
    Workload,
)


def arriving(rows: np.ndarray) -> np.ndarray:
    """Return the rows that go from rank r to rank s, in each block: [N, N, blocks]."""
    N, _, E = rows.shape
    own = [rows[..., a:b].sum(axis=-1) for a, b in pairwise(split_ends(E, N))]
    return np.stack(own, axis=1)


def away_from_home(rows: np.ndarray) -> np.ndarray:
    """Return how many rows have their expert on another rank, per block."""
    travelling = arriving(rows)
    return travelling.sum(axis=(0, 1)) - travelling.trace()


def expert_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(case.model.experts, len(case.inputs)), "experts"
