"""What all axes stand on: the protocol of what trains, and what ranks sum, compare and share.

trainer.py     what every axis ends in, a `Trainer`: backward, evaluate, step
collective_functions.py   collectives that backward passes through, each the adjoint of another
gradients.py   dW{+N} -> dW on every rank, never twice over the same ranks; the global norm
weights.py     check that copies are equal; collect and load arrays that ranks hold parts of
whole_matrices.py  parts of matrices travel to a rank that updates the whole one, and back
statistics.py  batch norms, routers and scales of arrays are of the whole batch
mixed_precision.py   16-bit weights with float32 copies, around any optimizer; loss scaling
"""

from minidist.parallel.gradients import (
    gradient,
    squares,
    sum_gradients,
    sum_squares_over,
    summed_once,
    summed_ranks,
)
from minidist.parallel.statistics import (
    check_balance,
    check_statistics,
    norms_that_train,
    share_scales,
    share_scales_of_stage,
    sum_loads,
    sum_statistics,
)
from minidist.parallel.weights import (
    check_replicas,
    check_same_state,
    check_same_weights,
    fingerprint,
    from_holders,
    load_own,
    shapes_of,
)
from minidist.parallel.whole_matrices import WholeMatrices

__all__ = [
    "WholeMatrices",
    "check_balance",
    "check_replicas",
    "check_same_state",
    "check_same_weights",
    "check_statistics",
    "fingerprint",
    "from_holders",
    "gradient",
    "load_own",
    "norms_that_train",
    "shapes_of",
    "share_scales",
    "share_scales_of_stage",
    "squares",
    "sum_gradients",
    "sum_loads",
    "sum_squares_over",
    "sum_statistics",
    "summed_once",
    "summed_ranks",
]
