"""A linear layer whose weight is cut by rows: every rank adds to all of the outputs.

Shoeybi et al., Megatron-LM (2019), section 3. Letters: N ranks, r this one.

    Y[B, F] = sum over r of X_r[B, C/N] W_r[C/N, F]  + b[F]            (the sum by g)
    dX_r[B, C/N] = dY W_r^T                                            no communication

Its input is the output of a column-parallel layer, so the two together need one all_reduce forward
and one backward. The bias is added once, after the sum; before it, it would be added N times.
"""

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.comm import Group
from minidist.nn.linear import ACTIVATIONS
from minidist.parallel.collective_functions import reduce_from, scatter
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import own_run
from minidist.tensor_parallel.whole import rows_of


class RowParallelLinear(nn.Module):
    """Y[..., F] = activation(g(X[..., C/N] W[C/N, F]) + b[F]).

    linear         the whole layer, the same on every rank; the rank's rows are copied
    scatter_input  take X[..., C], the same on every rank, and use this rank's part
    """

    def __init__(self, linear: nn.Linear, group: Group, scatter_input: bool = False):
        self.group, self.scatter_input = group, scatter_input
        self.activation = linear.activation
        rows = own_run(linear.weight.shape[0], group, "rows")
        self.weight = rows_of(linear.weight, rows)  # W[rows]
        self.bias = linear.bias

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = scatter(x, self.group) if self.scatter_input else x
        y = reduce_from(functions.linear(x, self.weight), self.group)
        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)
