"""A linear layer whose weight is cut by columns: every rank computes some of the outputs.

Shoeybi et al., Megatron-LM (2019), section 3. Letters: N ranks, r this one.

    X[B, C] -> f -> Y_r[B, F/N] = act(X W_r[C, F/N] + b_r[F/N])
    dX = all_reduce over r of dY_r W_r^T      (by f)

An activation acts on each column alone, so it fits in before anything is sent. Forward needs no
communication. In backward each rank computes what its columns add to dX, and the ranks add these
parts up.
"""

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.linear import ACTIVATIONS, GATED
from minidist.parallel.collective_functions import copy_to, gather
from minidist.rng import Randomness
from minidist.tensor_parallel.whole import columns_of


class ColumnParallelLinear(nn.Module):
    """Y[..., F/N] = activation(f(X[..., C]) W[C, F/N] + b[F/N]).

    linear         the whole layer, the same on every rank; the rank's columns are copied
    columns        the indices of the rank's columns; by default the r-th of N equal runs; of a
                   gated activation, whose columns are [2, F], the r-th run of both
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
        if columns is None:
            full = linear.weight.shape[1]
            F = full // 2 if self.activation in GATED else full
            columns = np.arange(full).reshape(-1, F)[:, own_run(F, group, "columns")].reshape(-1)
        self.weight = columns_of(linear.weight, columns)  # W[:, columns]
        self.bias = None if linear.bias is None else columns_of(linear.bias, columns)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = functions.linear(copy_to(x, self.group), self.weight, self.bias)
        y = ACTIVATIONS[self.activation](y)
        return gather(y, self.group) if self.gather_output else y


def own_run(full: int, group: Group, what: str) -> np.ndarray:
    """Return the indices of this rank's part of `full` things, which must split evenly."""
    if full % group.size:
        raise WrongInput(
            f"cannot split {full} {what} over {group.size} ranks; use a multiple of {group.size}"
        )
    each = full // group.size
    return np.arange(group.rank * each, (group.rank + 1) * each)
