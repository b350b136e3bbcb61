"""What mixed precision moves and holds: see minidist/mixed_precision.py."""

from dataclasses import replace

import numpy as np

from minidist import nn
from minidist.autograd.attention import kept_scores
from minidist.comm.collectives import split_sizes
from minidist.planning.costs.cost import Cost, Workload, positions_of
from minidist.planning.costs.data_parallel import replica_cost, zero_bytes_held
from minidist.planning.costs.layers import heads_of, width_of

HALF = 2  # bytes of float16, and of bfloat16
COPY_AND_MOMENTS = 12  # bytes per parameter that Adam's optimizer keeps in float32


def mixed_bytes(case: Workload, N: int) -> int:
    """Return the bytes of all steps, for P parameters, g bytes a gradient and w a weight.

    data parallelism   2 (N - 1) g P          half of what float32 moves, if g = 2
    ZeRO 1 and 2       (N - 1) (g + w) P
    ZeRO 3             (N - 1) (g + 2 w) P
    and 2 (N - 1) bytes, by which the ranks agree whether a gradient has overflowed.
    """
    options, parameters = case.options, case.model.parameters()
    P = sum(p.size for p in parameters if p.requires_grad)
    dtype = options.get("dtype") or parameters[0].dtype
    w, g = (np.dtype(d).itemsize for d in (dtype, options.get("grad_dtype") or dtype))
    moved = {0: 2 * g, 1: g + w, 2: g + w, 3: g + 2 * w}[options.get("zero", 0)]
    return max(1, options.get("steps", 0)) * (N - 1) * (moved * P + 2)


def mixed_bytes_held(stage: int, sizes: list[int], N: int, r: int, g: int = HALF) -> dict[str, int]:
    """Return the bytes that rank r holds of layers with these numbers of elements, with Adam.

    Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12 bytes per parameter. With gradients in float32,
    g = 4, as Megatron-LM keeps them: 2 + 4 + 12. ZeRO cuts them as in `zero_bytes_held`.
    """
    whole = zero_bytes_held(stage, sizes, N, r)
    shard = sum(split_sizes(n, N)[r] for n in sizes) if stage else sum(sizes)
    return {
        "parameters": whole["parameters"] // 4 * HALF,
        "gradients": whole["gradients"] // 4 * g,
        "optimizer state": COPY_AND_MOMENTS * shard,
    }


def mixed_costs(case: Workload, N: int) -> list[Cost]:
    """Return the costs of replicas of an untied Transformer in float16, for 2 + 2 + 12 bytes."""
    P, found = sum(p.size for p in case.model.parameters()), []
    kept = half_activation_bytes(case.model, positions_of(case))
    for r in range(N):
        cost = replica_cost(case, N, r)
        held = mixed_bytes_held(0, [P], N, r) | {"activations": cost.examples * kept}
        found.append(replace(cost, held=held))
    return found


def half_activation_bytes(model: nn.Transformer, T: int) -> int:
    """Return the bytes per example that a float16 Transformer's forward leaves for its backward.

    In float16: the inputs of four products, 7 X with X = T C; Q, K, V, 3 X; probabilities (up to
    128 positions). In float32: each norm's n and r, X + T; gelu's input and its tanh, 8 X; the
    probabilities of the loss, T V. So a block keeps 60 X + 8 T + 2 H kept_scores(T) bytes, where
    float32 keeps 80 X + 8 T + 4 H kept_scores(T).
    """
    C, H, V = width_of(model), heads_of(model), model.vocab
    X, depth = T * C, len(model.layers) - 2
    block = 60 * X + 8 * T + 2 * H * kept_scores(T)
    return depth * block + 6 * X + 4 * T + 4 * T * V
