"""Attention whose heads are split over ranks: heads are independent up to the output product.

Shoeybi et al., Megatron-LM (2019), section 3, figure 3b. Letters: N ranks, H heads of width D.

    X[B, T, C] -> f -> QKV_r[B, T, 3 H/N D] -> attention over this rank's heads -> rows of W_o -> g

QKV's columns are [3, H, D]: three blocks, each with all heads. A rank takes its heads out of all
three blocks. If it took an equal run of columns instead, one rank would get all queries and another
all values.
"""

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear, own_run
from minidist.tensor_parallel.row_parallel import RowParallelLinear


class ParallelAttention(nn.Module):
    """Y[B, T, C] = sum over ranks of O_r[B, T, C/N] W_o[C/N, C] + b, from H/N heads each.

    attention     the whole layer, the same on every rank
    columns, rows make the first and the last layer from a linear layer and the group
    """

    def __init__(
        self,
        attention: nn.CausalSelfAttention,
        group: Group,
        columns=ColumnParallelLinear,
        rows=RowParallelLinear,
    ):
        own = own_run(attention.heads, group, "heads")
        self.heads, self.attend = len(own), attention.attend
        self.qkv = columns(attention.qkv, group, columns=columns_of_heads(attention, own))
        self.output = rows(attention.output, group)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        qkv = self.qkv(x)
        B, T, width = qkv.shape
        qkv = qkv.reshape(B, T, 3, self.heads, width // (3 * self.heads))
        mixed = self.attend(qkv.transpose(2, 0, 3, 1, 4), randomness)  # [B, H/N, T, D]
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(B, T, width // 3))


def columns_of_heads(attention: nn.CausalSelfAttention, heads: np.ndarray) -> np.ndarray:
    """Return the columns of QKV that belong to these heads."""
    full = attention.qkv.weight.shape[1]
    return np.arange(full).reshape(3, attention.heads, -1)[:, heads].reshape(-1)
