"""What mixed precision moves and holds: see minidist/mixed_precision.py."""

from dataclasses import replace

import numpy as np

from minidist.planning.costs.cost import Cost, Workload, positions_of
from minidist.planning.costs.data_parallel import replica_cost
from minidist.planning.costs.layers import transformer_layers
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_bytes_held, zero_passes


def mixed_bytes(case: Workload, N: int) -> int:
    """Return the bytes of all steps, for P parameters, g bytes a gradient and w a weight.

    data parallelism   2 (N - 1) g P          half of what float32 moves, if g = 2
    ZeRO 1 and 2       (N - 1) (g + w) P
    ZeRO 3             (N - 1) (g + 2 w) P
    and 2 (N - 1) bytes, by which the ranks agree whether a gradient has overflowed, unless weights
    are rounded at random: there is no scale to choose.
    """
    options, parameters = case.options, case.model.parameters()
    P = sum(p.size for p in parameters if p.requires_grad)
    dtype = options.get("dtype") or parameters[0].dtype
    w, g = (np.dtype(d).itemsize for d in (dtype, options.get("grad_dtype") or dtype))
    stage = options.get("zero", 0)
    scatters, gathers = zero_passes(stage, 1)
    moved = scatters * g + gathers * (w if stage else g)
    agreed = 0 if options.get("stochastic") else 2
    return max(1, options.get("steps", 0)) * (N - 1) * (moved * P + agreed)


def mixed_costs(case: Workload, N: int) -> list[Cost]:
    """Return the costs of replicas of an untied Transformer in float16, for 2 + 2 + 12 bytes."""
    P = sum(p.size for p in case.model.parameters())
    layers = transformer_layers(TransformerSize.of(case.model), positions_of(case), itemsize=2)
    found = []
    for r in range(N):
        cost = replica_cost(case, N, r)
        held = zero_bytes_held(0, [P], N, r, BYTES["mixed", 16])
        held["activations"] = cost.examples * sum(layer.activations for layer in layers)
        found.append(replace(cost, held=held))
    return found
