"""What ranks that hold copies or parts of one model sum, compare and share.

gradients.py   dW{+N} -> dW on every rank, never twice over the same ranks; the global norm
weights.py     check that copies are equal; collect and load arrays that ranks hold parts of
statistics.py  a batch norm uses the statistics of the whole batch
"""

from minidist.replicas.gradients import (
    gradient,
    squares,
    sum_gradients,
    sum_squares_over,
    summed_once,
    summed_ranks,
)
from minidist.replicas.statistics import check_batch_norm, sum_statistics
from minidist.replicas.weights import (
    check_replicas,
    check_same_state,
    check_same_weights,
    fingerprint,
    from_holders,
    load_own,
    shapes_of,
)

__all__ = [
    "check_batch_norm",
    "check_replicas",
    "check_same_state",
    "check_same_weights",
    "fingerprint",
    "from_holders",
    "gradient",
    "load_own",
    "shapes_of",
    "squares",
    "sum_gradients",
    "sum_squares_over",
    "sum_statistics",
    "summed_once",
    "summed_ranks",
]
