"""What two branches on one or two ranks move and hold."""

from minidist.planning.costs.cost import Workload


def branches_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return 2, "branches"
