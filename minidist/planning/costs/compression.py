"""What compressed gradients and rare averages move and hold.

Letters: N ranks; n elements of a parameter, n x m of a matrix; r the rank of its approximation.
A stream of `minibatches` has that many steps. What is remembered, e, has float64 elements.
"""

from minidist.nn import Parameter
from minidist.nn.flat_parameters import flat_slices
from minidist.planning.costs.cost import Cost, Workload, trained_bytes
from minidist.planning.costs.data_parallel import replica_cost


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


def streaming_diloco_bytes(case: Workload, N: int) -> int:
    """Return N (N - 1) (n / 2, rounded up, + itemsize) per flat slice that meets: its elements n.

    With all bits 2 (N - 1) times its bytes; and for one batch, whose gradient is summed.
    """
    if not case.options.get("minibatches"):
        return local_sgd_bytes(case, N)
    sizes = met(case)
    if case.options.get("bits", 4) is None:
        return 2 * (N - 1) * sum(n * itemsize for n, itemsize in sizes)
    return N * (N - 1) * sum(-(-n // 2) + itemsize for n, itemsize in sizes)


def met(case: Workload, last: int | None = None) -> list[tuple[int, int]]:
    """Return the elements and bytes per element of each flat slice that is sent, after each step.

    last  after this number of last steps only
    """
    fragments, every = case.options.get("fragments", 1), case.options.get("every", 1)
    slices = flat_slices(case.model.parameters())
    homes = list(dict.fromkeys(s.home for s in slices))
    found = []
    for t in range(1 if last is None else steps(case) - last + 1, steps(case) + 1):
        for s in slices:
            first = (homes.index(s.home) % fragments + 1) * every // fragments
            if (t - first) % every == 0:
                found.append((s.stop - s.start, s.data.dtype.itemsize))
    return found


def streaming_diloco_costs(case: Workload, N: int) -> list[Cost]:
    """Of DiLoCo: and the mean difference of the fragment that is under way at the end."""
    P = sum(p.size for p in trained(case))
    came = sum(n for n, _ in met(case, case.options.get("tau", 0)))
    return [replica_cost(case, N, r, (2 * P, P + came, 3 * P), steps(case)) for r in range(N)]


def memory_costs(case: Workload, N: int) -> list[Cost]:
    """Beside each gradient a rank keeps what it has not sent."""
    P = sum(p.size for p in trained(case))
    return [replica_cost(case, N, r, (P, 2 * P, 2 * P)) for r in range(N)]


def power_sgd_costs(case: Workload, N: int) -> list[Cost]:
    """Beside each gradient a rank keeps what it has not sent, and beside each matrix's its Q."""
    P, kept = sum(p.size for p in trained(case)), 0
    for p in trained(case):
        r, _, m = approximation(p, case.options.get("rank"))
        kept += p.size + r * m
    return [replica_cost(case, N, r, (P, P + kept, 2 * P)) for r in range(N)]


def local_sgd_costs(case: Workload, N: int) -> list[Cost]:
    """Of DiLoCo: the weights that a round began with; AdamW's state, and the outer momentum."""
    P = sum(p.size for p in trained(case))
    return [replica_cost(case, N, r, (2 * P, P, 3 * P), steps(case)) for r in range(N)]


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
