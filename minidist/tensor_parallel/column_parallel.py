"""A linear layer whose weight is cut by columns: every rank computes some of the outputs.

Shoeybi et al., Megatron-LM (2019), section 3. Letters: N ranks, r this one.

    X[B, C] -> f -> Y_r[B, F/N] = act(X W_r[C, F/N] + b_r[F/N])        an activation fits between:
    dX = all_reduce over r of dY_r W_r^T      (by f)                   it acts on each column alone

Forward needs no communication; backward adds up dX, of which each rank has what its columns give.
"""

import numpy as np

from minidist import collective_functions, nn
from minidist.autograd import Tensor, functions
from minidist.backend import Array
from minidist.collective_functions import copy_to, gather
from minidist.comm import Group
from minidist.nn.linear import ACTIVATIONS
from minidist.rng import Randomness


class ColumnParallelLinear(nn.Module):
    """Y[..., F/N] = activation(f(X[..., C]) W[C, F/N] + b[F/N]).

    linear         the whole layer, the same on every rank; the rank's columns are copied
    columns        the indices of those; by default the r-th of N equal runs
    gather_output  return Y[..., F] on every rank
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: Group,
        columns: np.ndarray | None = None,
        gather_output: bool = False,
    ):
        self.group, self.gather_output = group, gather_output
        self.activation = linear.activation
        full = linear.weight.shape[1]
        columns = own_run(full, group, "columns") if columns is None else columns
        self.weight = linear.weight.part(nn.Shard(1, columns, full))
        self.bias = None if linear.bias is None else linear.bias.part(nn.Shard(0, columns, full))

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = functions.linear(copy_to(x, self.group), self.weight, self.bias)
        y = ACTIVATIONS[self.activation](y)
        return gather(y, self.group) if self.gather_output else y


def own_run(full: int, group: Group, what: str) -> np.ndarray:
    """Return the indices of this rank's part of `full` things, which must split evenly."""
    if full % group.size:
        raise ValueError(
            f"cannot split {full} {what} over {group.size} ranks; use a multiple of {group.size}"
        )
    each = full // group.size
    return np.arange(group.rank * each, (group.rank + 1) * each)


def sum_squares(model: nn.Module, group: Group, own: float = 0.0) -> float:
    """Return the sum of the squares of the whole gradient of a model whose matrices are split.

    For Optimizer.clip_global_norm, as `partial(sum_squares, model, group)`; its `own`, which counts
    on each rank what all ranks hold, is not used.
    """
    return collective_functions.sum_squares(counted(model.parameters(), group), group)


def counted(parameters: list[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """Return those that count on this rank: its parts, and on the first rank what all hold."""
    return [p for p in parameters if p.shard is not None or group.rank == 0]


def unsplit(part: Array, p: nn.Parameter, group: Group) -> Array:
    """Return the whole array of which `part`, shaped like the parameter p, is this rank's."""
    if p.shard is None:
        return part.copy()
    return p.shard.join(group.all_gather(part, p.shard.axis), group.all_gather(p.shard.indices))
