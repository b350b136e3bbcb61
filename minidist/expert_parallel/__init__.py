"""Experts over ranks: every rank has other examples and other experts.

Read `dispatch.py` (rows to the experts' ranks and back), `sharded_experts.py` (who holds which
expert, and whose gradients are summed), then `once_per_rank.py` (fewer rows).
"""

from minidist.expert_parallel.dispatch import Dispatch
from minidist.expert_parallel.once_per_rank import OncePerRank
from minidist.expert_parallel.sharded_experts import (
    ExpertParallel,
    expert_parameters,
    keep_own_experts,
)

__all__ = [
    "Dispatch",
    "ExpertParallel",
    "OncePerRank",
    "expert_parameters",
    "keep_own_experts",
]
