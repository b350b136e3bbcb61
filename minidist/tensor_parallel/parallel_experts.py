"""Experts whose matrices are split, with one f and one g around the whole mixture.

Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts
Training (2023), split experts so. Letters: N ranks of the group, k experts per position, R rows.

    X[B T, C] -> f -> rows -> columns | gelu | rows -> Y_r[R, C]{+N} -> sum of k rows -> g -> Y
    g[R, 1]   -> f ---------------------------------------------------^

The sum over the ranks and the sum over a position's experts may change places. So the ranks sum
B T rows, not the k B T of the experts, and once for all experts. The weights g of the gate meet
partial sums, so their gradient is one, too. A shared expert is a part of the same sum.
"""

from functools import partial

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.backend import Array
from minidist.comm import Group
from minidist.nn.linear import ACTIVATIONS
from minidist.parallel.collective_functions import copy_to, reduce_from
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.row_parallel import RowParallelLinear


class PartOfBias(Function):
    """Y = b / N  =>  db = dY: N partial sums have b once, and each rank has its whole gradient."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def forward(self, b: Array) -> Array:
        return b / self.ranks

    def backward(self, grad: Array) -> Array:
        return grad


class ExpertColumns(ColumnParallelLinear):
    """Y[R, F/N] = activation(X[R, C] W[C, F/N] + b[F/N]); f is around the mixture."""

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return ACTIVATIONS[self.activation](functions.linear(x, self.weight, self.bias))


class ExpertRows(RowParallelLinear):
    """Y[R, C]{+N} = X[R, F/N] W[F/N, C] + b[C] / N; g is around the mixture."""

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        bias = None if self.bias is None else PartOfBias(self.group.size)(self.bias)
        return functions.linear(x, self.weight, bias)


def split_mixture(mixture: nn.MixtureOfExperts, group: Group) -> None:
    """Keep this rank's part of each expert's matrices; sum over the ranks around the mixture."""
    for expert in filter(None, [*mixture.experts, mixture.shared]):
        expand, contract = expert.expand, expert.contract
        assert isinstance(expand, nn.Linear) and isinstance(contract, nn.Linear)
        expert.expand, expert.contract = ExpertColumns(expand, group), ExpertRows(contract, group)
    mixture.enter, mixture.leave = partial(copy_to, group=group), partial(reduce_from, group=group)
