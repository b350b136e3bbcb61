"""What a pipeline moves, holds and waits for, under any programs.  p ranks, m micro-batches."""

from collections.abc import Callable
from math import ceil

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, no_grad
from minidist.pipeline_parallel.actions import Programs, last_stage
from minidist.pipeline_parallel.holders import holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.planning.costs.cost import Cost, Workload, cost_of, positions_of, whole_layers
from minidist.planning.costs.layers import Layer
from minidist.planning.costs.stash import entries, peak_of
from minidist.planning.simulator import simulate


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


def stages_of(own: list[Layer], programs: Programs) -> list[list[Layer]]:
    """Return the layers of each virtual stage."""
    cut = cut_of(len(own), 1 + last_stage(programs.placement))
    return [[own[i] for i in part] for part in cut]


def pipeline_costs(
    case: Workload,
    programs: Programs,
    m: int,
    own: list[Layer] | None = None,
    dp: int = 1,
    versions: Callable[[int, int], int] = lambda p, r: 1,
) -> list[Cost]:
    """Return the cost of each rank of one pipeline; its program says what it keeps, and how long.

    Activations are the peak at the ends of forward passes, where observe/costs measures it.
    If backward is in two halves, they are an upper bound: between I and W a layer holds at most
    `Layer.deferred` more than before I, and mostly less.

    own       the layers, if their matrices are split
    dp        pipelines that share the batch
    versions  (p, r) -> versions of its weights that rank r of p holds
    """
    own = whole_layers(case) if own is None else own
    stages, examples, result = stages_of(own, programs), len(case.inputs) // dp, []
    for r in range(len(programs)):
        mine = [stages[k] for k in programs.placement[r]]
        held = [layer for stage in mine for layer in stage]
        largest = ceil(examples / m)  # examples of a micro-batch
        each = [sum(layer.activations for layer in stage) * largest for stage in mine]
        more = [sum(layer.deferred for layer in stage) * largest for stage in mine]
        peak = peak_of(entries(programs[r], len(programs.placement[r])), each + more)
        P = sum(layer.parameters for layer in held)
        elements = (versions(len(programs), r) * P, P, 2 * P)
        result.append(cost_of(held, examples, positions_of(case), elements, peak))
    return result


def pipeline_useful_share(
    case: Workload,
    programs: Programs,
    m: int,
    N: int,
    own: list[Layer] | None = None,
    dp: int = 1,
    rounds: int = 1,
) -> float:
    """Return one device's work over N times that of the slowest rank, its bubble included.

    programs  of one of dp pipelines, for `rounds` batches of m micro-batches each; many rounds
              show an asynchronous pipeline on a long stream
    """
    whole = whole_layers(case)
    stages = stages_of(whole if own is None else own, programs)
    work = [sum(layer.work for layer in stage) for stage in stages]
    each = ceil(ceil(len(case.inputs) / dp) / m)  # examples of the largest micro-batch
    busiest = each * simulate(programs, work, work, work).makespan / 3 / rounds
    return float(sum(layer.work for layer in whole) * len(case.inputs) / (N * busiest))


def layers_limit(case: Workload, chunks: int) -> tuple[int, str]:
    """Return the most ranks that have `chunks` stages of one layer each."""
    what = "layers" if chunks == 1 else f"layers, {chunks} on each"
    return len(case.model.layers) // chunks, what
