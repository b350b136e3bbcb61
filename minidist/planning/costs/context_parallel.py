"""What a sequence cut over ranks moves, holds and computes.  N ranks hold T_0, ..., T_(N-1) of T.

C numbers of Q or O per position, of H heads; kv numbers of K, and of V: C, or C K/H where queries
are grouped.
"""

from minidist.planning.costs.cost import (
    Workload,
    positions_of,
)


def positions_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return positions_of(case), "positions"
