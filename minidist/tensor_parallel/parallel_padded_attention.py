"""Attention to another sequence, its heads split over ranks.

Shoeybi et al., Megatron-LM (2019), section 3, figure 3b, split the attention of one sequence; the
same split is used here for two. Letters: N ranks, H heads of width D, X the positions that attend,
M the memory that they attend to (in an encoder X itself).

    X[B, T, C] -> f -> Q_r[B, T, H/N D]    \\
                                            attention over this rank's heads -> rows of W_o -> g
    M[B, S, C] -> f -> KV_r[B, S, 2 H/N D] /

Q's columns are [H, D], those of K and V are [2, H, D]: two blocks, each with all heads. A rank
takes its heads out of both. Every rank has all rows of M, and so finds the same padding as one
device. Backward sums the gradients of X and of M over ranks separately: each f is an all_reduce.
"""

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear, own_run
from minidist.tensor_parallel.row_parallel import RowParallelLinear


class ParallelPaddedAttention(nn.PaddedAttention):
    """Y[B, T, C] = sum over ranks of O_r[B, T, C/N] W_o[C/N, C] + b, from H/N heads each.

    attention     the whole layer, the same on every rank
    columns, rows make the first layers and the last from a linear layer and the group
    """

    def __init__(
        self,
        attention: nn.PaddedAttention,
        group: Group,
        columns=ColumnParallelLinear,
        rows=RowParallelLinear,
    ):
        own = own_run(attention.heads, group, "heads")
        self.heads = len(own)
        self.query, self.key_value = (
            columns(linear, group, columns=columns_in_blocks(linear, attention.heads, own))
            for linear in (attention.query, attention.key_value)
        )
        self.output = rows(attention.output, group)


def columns_in_blocks(linear: nn.Linear, heads: int, own: np.ndarray) -> np.ndarray:
    """Return the columns of these heads in a weight[C, k C], whose columns are k blocks [H, D]."""
    C, full = linear.weight.shape
    return np.arange(full).reshape(-1, heads, C // heads)[:, own].reshape(-1)
