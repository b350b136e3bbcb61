"""What data parallelism and ZeRO move and hold.  N ranks, r one of them, P parameters."""

from minidist.planning.costs.cost import (
    Workload,
    loads_bytes,
    trained_bytes,
)
from minidist.planning.costs.zero import zero_passes


def data_parallel_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) S, and the bytes of the routers' loads, if they have biases.

    S bytes of parameters that are not frozen are scattered and gathered.
    """
    return 2 * (N - 1) * trained_bytes(case.model) + loads_bytes(case.model, N)


def zero_bytes(case: Workload, N: int, stage: int = 3) -> int:
    """Return (N - 1) S times 2, 1 + m or 3 m in stages 1, 2 and 3, for m micro-batches.

    Where k ranks share a copy: of each of the h = N / k copies (k - 1) S times that, and 2 (h - 1)
    S between them.
    """
    stage, k = case.options.get("stage", stage), case.options.get("shards") or N
    passes = zero_passes(stage, case.options.get("micro_batches", 1))
    h = N // k
    return (sum(passes) * h * (k - 1) + 2 * (h - 1)) * trained_bytes(case.model)


def examples_limit(case: Workload, ranks: int) -> tuple[int, str]:
    """Return the largest useful number of ranks, and the name of what each rank then has one of."""
    return len(case.inputs), "examples"
