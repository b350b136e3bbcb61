"""What compressed gradients and rare averages move and hold.

Letters: N ranks; n elements of a parameter, n x m of a matrix; r the rank of its approximation.
A stream of `minibatches` has that many steps. What is remembered, e, has float64 elements.
"""

from minidist.nn import Parameter
from minidist.planning.costs.cost import Workload, trained_bytes


def top_k_bytes(case: Workload, N: int) -> int:
    """Return N (N - 1) k (itemsize + 4) per parameter and step; k = share n, at least 1."""
    share = case.options.get("share", 1.0)
    each = [max(1, int(share * p.size)) * (p.dtype.itemsize + 4) for p in trained(case)]
    return steps(case) * N * (N - 1) * sum(each)


def sign_bytes(case: Workload, N: int) -> int:
    """Return N (N - 1) (n / 8, rounded up, + 8) per parameter and step."""
    return steps(case) * N * (N - 1) * sum(-(-p.size // 8) + 8 for p in trained(case))


def int8_bytes(case: Workload, N: int) -> int:
    """Return N (N - 1) (n + 8) per parameter and step."""
    return steps(case) * N * (N - 1) * sum(p.size + 8 for p in trained(case))


def power_sgd_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) times r (n + m) elements per matrix and step, n per vector."""
    each = []
    for p in trained(case):
        r, n, m = approximation(p, case.options.get("rank"))
        each.append(p.dtype.itemsize * (r * (n + m) if r else p.size))
    return steps(case) * 2 * (N - 1) * sum(each)


def local_sgd_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) S per round, for S bytes of parameters: an average in H steps."""
    return steps(case) // case.options.get("every", 1) * 2 * (N - 1) * trained_bytes(case.model)


def approximation(p: Parameter, rank: int | None) -> tuple[int, int, int]:
    """Return r, n, m of PowerSGD's approximation of a matrix; 0, n, 0 of a vector."""
    if len(p.shape) < 2:
        return 0, p.size, 0
    n, m = p.shape[0], p.size // p.shape[0]
    return min(n, m, *([] if rank is None else [rank])), n, m


def trained(case: Workload) -> list[Parameter]:
    return [p for p in case.model.parameters() if p.requires_grad]


def steps(case: Workload) -> int:
    return case.options.get("minibatches") or 1
