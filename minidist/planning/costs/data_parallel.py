"""What data parallelism and ZeRO move and hold.  N ranks, r one of them, P parameters."""

import numpy as np

from minidist import nn
from minidist.comm.collectives import split_sizes
from minidist.planning.costs.cost import Cost, Workload, cost_of, positions_of, trained_bytes
from minidist.planning.costs.layers import Layer, cnn_layers, whole_layers


def data_parallel_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) S: S bytes of parameters that are not frozen, scattered and gathered."""
    return 2 * (N - 1) * trained_bytes(case.model)


def sync_batch_norm_bytes(case: Workload, N: int) -> int:
    """Return the bytes of `data_parallel_bytes`, and 2 (N - 1) times those of batch norms' sums.

    Per norm of C channels that trains these are 2 C + 1 numbers in float64 forward, and backward
    2 C of the model's dtype.
    """
    gains = [norm.gain.data for norm in case.model.modules(nn.BatchNorm) if norm.training]
    sums = sum(8 * (2 * gain.size + 1) + 2 * gain.nbytes for gain in gains)
    return data_parallel_bytes(case, N) + 2 * (N - 1) * sums


def zero_bytes(case: Workload, N: int, stage: int) -> int:
    """Return (N - 1) S times 2, 1 + m or 3 m in stages 1, 2 and 3, for m micro-batches."""
    m = case.options.get("micro_batches", 1)
    return {1: 2, 2: 1 + m, 3: 3 * m}[stage] * (N - 1) * trained_bytes(case.model)


def data_parallel_costs(case: Workload, N: int) -> list[Cost]:
    """Every rank has all layers and a share of the examples."""
    return [replica_cost(case, N, r) for r in range(N)]


def zero_costs(case: Workload, N: int, stage: int) -> list[Cost]:
    """Every rank has all layers, a share of the examples, and a share of what is held."""
    sizes = [layer.parameters for layer in _layers(case)]
    held = [zero_bytes_held(stage, sizes, N, r).values() for r in range(N)]
    elements = [tuple(nbytes // 4 for nbytes in by_kind) for by_kind in held]
    return [replica_cost(case, N, r, elements[r]) for r in range(N)]


def replica_cost(
    case: Workload, N: int, r: int, held: tuple[int, int, int] | None = None, minibatches: int = 1
) -> Cost:
    """Return the cost of rank r, which has all layers and its share of each minibatch."""
    batches = np.array_split(np.arange(len(case.inputs)), minibatches)
    shares = [len(np.array_split(batch, N)[r]) for batch in batches]
    layers, positions = _layers(case), positions_of(case)
    flight = cost_of(layers, max(shares), positions).held["activations"]
    return cost_of(layers, sum(shares), positions, held, flight)


def examples_limit(case: Workload, ranks: int) -> tuple[int, str]:
    """Return the largest useful number of ranks, and the name of what each rank then has one of."""
    return len(case.inputs), "examples"


def _layers(case: Workload) -> list[Layer]:
    if isinstance(case.model, nn.CNN):
        return cnn_layers(case.model, case.inputs.shape[1:])
    return whole_layers(case.model, positions_of(case))


# Bytes per parameter in float32 with Adam: the convention of `zero_bytes_held`. (Rajbhandari et al.
# also count 16, for mixed precision: weights 2, gradients 2, and 12 that the optimizer keeps.)
FP32_ADAM = {"parameters": 4, "gradients": 4, "optimizer state": 8}


def zero_bytes_held(stage: int, sizes: list[int], N: int, r: int) -> dict[str, int]:
    """Return the bytes that rank r holds of layers with these numbers of elements, by `FP32_ADAM`.

    Stage 0 is plain data parallelism: 16 bytes per parameter. There are P parameters in all; s of
    them are rank r's, and b are in the largest layer:

        stage   parameters    gradients    optimizer state
        0       4 P           4 P          8 P
        1       4 P           4 P          8 s
        2       4 P           4 (s + b)    8 s
        3       4 (s + 2 b)   4 (s + b)    8 s

    This holds if no layer is tied to another one; frozen parameters do not count.
    """
    P, b = sum(sizes), max(sizes)
    s = sum(split_sizes(n, N)[r] for n in sizes)
    elements = {
        "parameters": s + 2 * b if stage == 3 else P,
        "gradients": s + b if stage >= 2 else P,
        "optimizer state": s if stage >= 1 else P,
    }
    return {what: FP32_ADAM[what] * n for what, n in elements.items()}


def zero_bytes_moved(
    stage: int, sizes: list[int], itemsize: int, N: int, r: int, micro_batches: int = 1
) -> int:
    """Return the payload bytes that rank r sends in one step of ZeRO.

    A layer of n elements, s of them r's: n - s in a reduce_scatter, (N - 1) s in an all_gather.
    Stage 1 does one of each per step; stage 2 scatters, stage 3 scatters once and gathers twice,
    per micro-batch. Where N divides all n: (N - 1)/N P times 2, 1 + M, or 3 M.
    """
    P, s = sum(sizes), sum(split_sizes(n, N)[r] for n in sizes)
    scatters = {1: 1, 2: micro_batches, 3: micro_batches}[stage]
    gathers = {1: 1, 2: 1, 3: 2 * micro_batches}[stage]
    return itemsize * (scatters * (P - s) + gathers * (N - 1) * s)
