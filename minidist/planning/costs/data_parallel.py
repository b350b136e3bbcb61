"""What data parallelism and ZeRO move and hold.  N ranks, r one of them, P parameters."""

import numpy as np

from minidist import nn
from minidist.pieces import split_sizes
from minidist.planning.costs.cost import (
    ITEMSIZE,
    Cost,
    Workload,
    cost_of,
    loads_bytes,
    positions_of,
    trained_bytes,
    whole_layers,
)
from minidist.planning.costs.zero import zero_elements, zero_passes


def data_parallel_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) S, and the bytes of the routers' loads, if they have biases.

    S bytes of parameters that are not frozen are scattered and gathered.
    """
    return 2 * (N - 1) * trained_bytes(case.model) + loads_bytes(case.model, N)


def sync_batch_norm_bytes(case: Workload, N: int) -> int:
    """Return the bytes of `data_parallel_bytes`, and 2 (N - 1) times those of batch norms' sums.

    Per norm of C channels that trains these are 2 C + 1 numbers in float64 forward, and backward
    2 C of the model's dtype.
    """
    gains = [norm.gain.data for norm in case.model.modules(nn.BatchNorm) if norm.training]
    sums = sum(8 * (2 * gain.size + 1) + 2 * gain.nbytes for gain in gains)
    return data_parallel_bytes(case, N) + 2 * (N - 1) * sums


def zero_bytes(case: Workload, N: int, stage: int = 3) -> int:
    """Return (N - 1) S times 2, 1 + m or 3 m in stages 1, 2 and 3, for m micro-batches.

    Where k ranks share a copy: of each of the h = N / k copies (k - 1) S times that, and 2 (h - 1)
    S between them.
    """
    stage, k = case.options.get("stage", stage), case.options.get("shards") or N
    passes = zero_passes(stage, case.options.get("micro_batches", 1))
    h = N // k
    return (sum(passes) * h * (k - 1) + 2 * (h - 1)) * trained_bytes(case.model)


def quantized_bytes(case: Workload, N: int) -> int:
    """Return the bytes of ZeRO's stage 3 whose gathers have an int8 per element, and scales.

    In a step every element travels to N - 1 ranks twice, for a byte each time; so does the scale
    of every block, with a block of fewer elements at the end of a shard.
    """
    steps, block = case.options.get("minibatches") or 1, case.options.get("block", 1)
    sizes = [n for layer in case.model.layers for n in split_sizes(layer.home.size, N)]
    gathered = sum(n + ITEMSIZE * -(-n // block) for n in sizes)
    return steps * (N - 1) * (trained_bytes(case.model) + 2 * gathered)


def data_parallel_costs(case: Workload, N: int) -> list[Cost]:
    """Every rank has all layers and a share of the examples."""
    return [replica_cost(case, N, r) for r in range(N)]


def zero_costs(case: Workload, N: int, stage: int = 3) -> list[Cost]:
    """Every rank has all layers, a share of the examples, and a share of what is held."""
    sizes, found = [layer.parameters for layer in whole_layers(case)], []
    stage, k = case.options.get("stage", stage), case.options.get("shards") or N
    for r in range(N):
        s = sum(split_sizes(n, k)[r % k] for n in sizes)
        P, gradients, own = zero_elements(stage, sum(sizes), s, max(sizes))
        found.append(replica_cost(case, N, r, (P, gradients, 2 * own)))
    return found


def replica_cost(
    case: Workload, N: int, r: int, held: tuple[int, int, int] | None = None, minibatches: int = 1
) -> Cost:
    """Return the cost of rank r, which has all layers and its share of each minibatch."""
    batches = np.array_split(np.arange(len(case.inputs)), minibatches)
    shares = [len(np.array_split(batch, N)[r]) for batch in batches]
    layers, positions = whole_layers(case), positions_of(case)
    flight = cost_of(layers, max(shares), positions).held["activations"]
    return cost_of(layers, sum(shares), positions, held, flight)


def examples_limit(case: Workload, ranks: int) -> tuple[int, str]:
    """Return the largest useful number of ranks, and the name of what each rank then has one of."""
    return len(case.inputs), "examples"
