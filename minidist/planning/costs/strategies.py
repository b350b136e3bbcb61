"""Bytes that all ranks send in a step of a strategy, where its paper prints them.

Those of other strategies are measured, and recorded in tests/ledgers.txt. Letters: N ranks; S bytes
of the parameters that are not frozen; n elements of a parameter, n x m of a matrix; r the rank of
its approximation. A stream of `minibatches` has that many steps.
"""

from math import ceil
from typing import Any, Protocol

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, no_grad
from minidist.errors import WrongInput
from minidist.nn import Parameter
from minidist.pipeline_parallel.actions import Programs, last_stage
from minidist.pipeline_parallel.holders import cut_of, holders
from minidist.planning.costs.zero import zero_passes


class Workload(Protocol):
    """A model, its batch, the options of the strategy; a `Case` of verify/strategies/ is one.

    model  of the class that the strategy splits, which its record checks before
    """

    @property
    def model(self) -> Any: ...  # each formula takes a model of its own class

    @property
    def inputs(self) -> np.ndarray: ...

    @property
    def options(self) -> dict: ...


def data_parallel_bytes(case: Workload, N: int) -> int:
    """Return 2 (N - 1) S, and the bytes of the routers' loads, if they have biases.

    S bytes of parameters that are not frozen are scattered and gathered.
    """
    loads = sum(balance.load.nbytes for balance in case.model.modules(nn.BiasBalance))
    return 2 * (N - 1) * (trained_bytes(case.model) + loads)


def zero_bytes(case: Workload, N: int, stage: int = 3) -> int:
    """Return (N - 1) S times 2, 1 + m or 3 m in stages 1, 2 and 3, for m micro-batches.

    Where k ranks share a copy: of each of the h = N / k copies (k - 1) S times that, and 2 (h - 1)
    S between them.
    """
    stage, k = case.options.get("stage", stage), case.options.get("shards") or N
    passes = zero_passes(stage, case.options.get("micro_batches", 1))
    h = N // k
    return (sum(passes) * h * (k - 1) + 2 * (h - 1)) * trained_bytes(case.model)


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


def column_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_gather of Y forward and an all_reduce of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(F + 2 * C for C, F in shapes))


def row_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_reduce of Y forward and an all_gather of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(2 * F + C for C, F in shapes))


def _bytes(case: Workload, N: int, numbers: int) -> int:
    """Return (N - 1) times `numbers` float64 per example, or per position of each."""
    rows = case.inputs.size if case.inputs.dtype.kind in "iu" else len(case.inputs)
    return (N - 1) * rows * numbers * 8


def shapes_of(model: nn.Sequential) -> list[tuple[int, ...]]:
    """Return the shapes [C, F] of the weights of linear layers."""
    shapes = [layer.weight.shape for layer in model.layers if isinstance(layer, nn.Linear)]
    if len(shapes) < len(model.layers):
        raise WrongInput("only an nn.MLP has a closed form; measure a step of other layers")
    return shapes


def pipeline_bytes(case: Workload, programs: Programs) -> int:
    """Return 2 B T C itemsize per boundary between ranks, plus an all_reduce of tied parameters.

    A gradient crosses every boundary, whatever is frozen: a program does not depend on the model.
    """
    last, model = last_stage(programs.placement), case.model
    cut, sizes = cut_of(len(model.layers), 1 + last), boundary_bytes(case)
    rank_of = {stage: r for r, stages in enumerate(programs.placement) for stage in stages}
    moved = sum(2 * sizes[cut[k][-1]] for k in range(last) if rank_of[k] != rank_of[k + 1])
    named = model.named_parameters()
    for name, stages in holders(model, cut).items():  # several may hold a tied one
        if named[name].requires_grad:
            moved += 2 * (len({rank_of[k] for k in stages}) - 1) * named[name].data.nbytes
    return moved


def replicated_bytes(case: Workload, cut: list[range], replicas: list[int], m: int) -> int:
    """Return the bytes of m minibatches through stages that have replicas.

    2 B T C itemsize per boundary, for all B examples together. And in each round of k minibatches
    the k replicas of a stage sum its gradients: 2 (k - 1) times its parameters' bytes.
    """
    sizes, moved = boundary_bytes(case), 0
    for part, k in zip(cut, replicas, strict=True):
        if part.stop < len(case.model.layers):
            moved += 2 * sizes[part.stop - 1]
        parameters = [p for i in part for p in case.model.layers[i].parameters() if p.requires_grad]
        moved += ceil(m / k) * 2 * (k - 1) * sum(p.data.nbytes for p in parameters)
    return moved


def boundary_bytes(case: Workload) -> list[int]:
    """Return the bytes of the whole batch's activation after each layer."""
    x, sizes = case.inputs, []
    with no_grad():
        for layer in case.model.layers:
            x = layer(x if not isinstance(x, np.ndarray) or x.dtype.kind in "iu" else Tensor(x))
            sizes.append(x.data.nbytes)
    return sizes


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters that are not frozen."""
    return sum(p.data.nbytes for p in model.parameters() if p.requires_grad)
