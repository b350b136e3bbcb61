"""What a pipeline moves, holds and waits for, under any programs.  p ranks, m micro-batches."""

from math import ceil

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, no_grad
from minidist.pipeline_parallel.actions import Programs, last_stage
from minidist.pipeline_parallel.holders import holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.planning.costs.cost import Workload


def layout(
    model: nn.Sequential, programs: Programs
) -> tuple[list[range], list[int], dict[str, int]]:
    """Return where the layers are under these programs: (cut, crossed, copies).

    cut      the layers of each virtual stage
    crossed  the stages whose output goes to another rank
    copies   {parameter name: the ranks that hold it}; several may hold a tied one
    """
    last = last_stage(programs.placement)
    cut = cut_of(len(model.layers), 1 + last)
    rank_of = {k: r for r, own in enumerate(programs.placement) for k in own}
    crossed = [k for k in range(last) if rank_of[k] != rank_of[k + 1]]
    held = holders(model, cut).items()
    return cut, crossed, {name: len({rank_of[k] for k in stages}) for name, stages in held}


def boundary_bytes(case: Workload) -> list[int]:
    """Return the bytes of the whole batch's activation after each layer."""
    x, sizes = case.inputs, []
    with no_grad():
        for layer in case.model.layers:
            x = layer(x if not isinstance(x, np.ndarray) or x.dtype.kind in "iu" else Tensor(x))
            sizes.append(x.data.nbytes)
    return sizes


def pipeline_bytes(case: Workload, programs: Programs) -> int:
    """Return 2 B T C itemsize per boundary between ranks, plus an all_reduce of tied parameters.

    A gradient crosses every boundary, whatever is frozen (see gradients.py).
    """
    cut, crossed, copies = layout(case.model, programs)
    sizes, named = boundary_bytes(case), case.model.named_parameters()
    moved = sum(2 * sizes[cut[k][-1]] for k in crossed)
    return moved + sum(
        2 * (copies[name] - 1) * p.data.nbytes for name, p in named.items() if p.requires_grad
    )


def replicated_bytes(case: Workload, cut: list[range], replicas: list[int], m: int) -> int:
    """Return the bytes of m minibatches through stages that have replicas.

    2 B T C itemsize per boundary, for all B examples together. And in each round of k minibatches
    the k replicas of a stage sum its gradients: 2 (k - 1) times its parameters' bytes.
    """
    sizes, moved = boundary_bytes(case), 0
    for part, k in zip(cut, replicas, strict=True):
        if part.stop < len(case.model.layers):
            moved += 2 * sizes[part.stop - 1]
        own = [p for i in part for p in case.model.layers[i].parameters() if p.requires_grad]
        moved += ceil(m / k) * 2 * (k - 1) * sum(p.data.nbytes for p in own)
    return moved


def layers_limit(case: Workload, chunks: int) -> tuple[int, str]:
    """Return the most ranks that have `chunks` stages of one layer each."""
    what = "layers" if chunks == 1 else f"layers, {chunks} on each"
    return len(case.model.layers) // chunks, what
