"""Attention whose heads are split over ranks: heads are independent up to the output product.

Shoeybi et al., Megatron-LM (2019), section 3, figure 3b; `ParallelPaddedAttention` splits in this
way attention to another sequence, too. Letters: N ranks, H heads of width D; X the positions that
attend, M the memory of S positions that they attend to (in an encoder X itself).

    X[B, T, C] -> f -> QKV_r[B, T, 3 H/N D] -> attention over this rank's heads -> rows of W_o -> g

    X[B, T, C] -> f -> Q_r[B, T, H/N D]    \\
                                            attention over this rank's heads -> rows of W_o -> g
    M[B, S, C] -> f -> KV_r[B, S, 2 H/N D] /

The columns of QKV are [3, H, D]: three blocks, each with all heads. A rank takes its heads out of
all blocks. If it took an equal run of columns instead, one rank would get all queries and another
all values. Every rank has all rows of M, and so finds the padding that one device finds. Backward
sums the gradients of X and of M over ranks separately: each f is an all_reduce.
"""

from collections.abc import Callable

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
        columns: Callable = ColumnParallelLinear,
        rows: Callable = RowParallelLinear,
    ):
        heads = attention.heads
        own = own_run(heads, group, "heads")
        self.heads, self.attend = len(own), attention.attend
        self.qkv = columns(
            attention.qkv, group, columns=columns_of_heads(attention.qkv, heads, own)
        )
        self.output = rows(attention.output, group)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        qkv = self.qkv(x)
        B, T, width = qkv.shape
        qkv = qkv.reshape(B, T, 3, self.heads, width // (3 * self.heads))
        mixed = self.attend(qkv.transpose(2, 0, 3, 1, 4), randomness)  # [B, H/N, T, D]
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(B, T, width // 3))


class ParallelPaddedAttention(nn.PaddedAttention):
    """Y[B, T, C] = sum over ranks of O_r[B, T, C/N] W_o[C/N, C] + b; arguments as above."""

    def __init__(
        self,
        attention: nn.PaddedAttention,
        group: Group,
        columns: Callable = ColumnParallelLinear,
        rows: Callable = RowParallelLinear,
    ):
        own = own_run(attention.heads, group, "heads")
        self.heads = len(own)
        self.query, self.key_value = (
            columns(linear, group, columns=columns_of_heads(linear, attention.heads, own))
            for linear in (attention.query, attention.key_value)
        )
        self.output = rows(attention.output, group)


def columns_of_heads(linear: nn.Linear, heads: int, own: np.ndarray) -> np.ndarray:
    """Return the columns of these heads in a weight[C, k C], whose columns are k blocks [H, D]."""
    C, full = linear.weight.shape
    return np.arange(full).reshape(-1, heads, C // heads)[:, own].reshape(-1)
