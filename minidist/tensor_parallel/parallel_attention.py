"""Attention whose heads are split over ranks: heads are independent up to the output product.

Shoeybi et al., Megatron-LM (2019), section 3, figure 3b; `ParallelPaddedAttention` splits in this
way attention to another sequence, too, and `ParallelGroupedQueryAttention` grouped queries (Ainslie
et al., GQA, 2023, section 2.2). Letters: N ranks, H heads of width D, K heads of keys and values; X
the positions that attend, M the memory of S positions that they attend to (in an encoder X itself).

    X[B, T, C] -> f -> QKV_r[B, T, 3 H/N D] -> attention over this rank's heads -> rows of W_o -> g

    X[B, T, C] -> f -> Q_r[B, T, H/N D]    \\
                                            attention over this rank's heads -> rows of W_o -> g
    M[B, S, C] -> f -> KV_r[B, S, 2 H/N D] /

    X[B, T, C] -> f -> X W_q of H/N heads, X W_kv of K/N -> attention -> rows of W_o -> g

The columns of QKV are [3, H, D]: three blocks, each with all heads. A rank takes its heads out of
all blocks. If it took an equal run of columns instead, one rank would get all queries and another
all values. Every rank has all rows of M, and so finds the padding that one device finds. Backward
sums the gradients of X and of M over ranks separately: each f is an all_reduce.

If K < N, then N/K ranks hold the same head of keys and values, each for other queries. The gradient
of W_kv is the sum over these ranks, and no others: an f on the weight itself, whose all_reduce
moves 2 C D numbers.
"""

from collections.abc import Callable

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.parallel.collective_functions import copy_to
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear, own_run
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.whole import columns_of


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
        heads = own_run(attention.heads, group, "heads")
        self.heads, self.attend = len(heads), attention.attend
        of_heads = columns_of_heads(attention.qkv, attention.heads, heads)
        self.qkv = columns(attention.qkv, group, columns=of_heads)
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
        heads = own_run(attention.heads, group, "heads")
        self.heads = len(heads)
        self.query, self.key_value = (
            columns(linear, group, columns=columns_of_heads(linear, attention.heads, heads))
            for linear in (attention.query, attention.key_value)
        )
        self.output = rows(attention.output, group)


def columns_of_heads(linear: nn.Linear, heads: int, own: np.ndarray) -> np.ndarray:
    """Return the columns of these heads in a weight[C, k C], whose columns are k blocks [H, D]."""
    C, full = linear.weight.shape
    return np.arange(full).reshape(-1, heads, C // heads)[:, own].reshape(-1)


def holders_of(group: Group, kv_heads: int) -> Group | None:
    """Return the ranks that hold the same head of keys and values; None if each holds others."""
    each = group.size // kv_heads
    return group.split(group.rank // each) if each > 1 else None


def split_products(x: Tensor, group: Group, *weights: Tensor) -> list[Tensor]:
    """Return f(X) W[C, F/N] of several weights, one f for all of them."""
    x = copy_to(x, group)
    return [functions.linear(x, w) for w in weights]


class ParallelGroupedQueryAttention(nn.GroupedQueryAttention):
    """Y[B, T, C] = sum over ranks of O_r[B, T, H/N D] W_o[H/N D, C].

    attention  the whole layer, the same on every rank
    rows       makes the last layer from a linear layer and the group
    products   x, group, weights -> f(x) W of each weight
    holders    `holders_of` this group; by default it is made here
    """

    def __init__(
        self,
        attention: nn.GroupedQueryAttention,
        group: Group,
        rows: Callable = RowParallelLinear,
        products: Callable = split_products,
        holders: Group | None = None,
    ):
        N, H, K = group.size, attention.heads, attention.kv_heads
        heads = own_run(H, group, "heads")
        if K % N and N % K:
            raise WrongInput(
                f"cannot split {K} heads of keys and values over {N} ranks; use a multiple or a "
                f"divisor of {K}"
            )
        if K < N and attention.key_value.weight.format.product is not None:
            raise WrongInput(
                f"{N} ranks would round their parts of the gradient of {K} heads of keys and "
                f"values to eight bits, not its sum; use a divisor of {K}"
            )
        read = np.unique(heads // (H // K))  # the heads of keys and values that these queries read
        self.group, self.products, self.attend = group, products, attention.attend
        self.heads, self.kv_heads, self.theta = len(heads), len(read), attention.theta
        self.holders = holders or holders_of(group, K)
        q, kv = attention.query.weight, attention.key_value.weight
        self.q = columns_of(q, heads_in(q, 1, H, heads))
        self.kv = columns_of(kv, heads_in(kv, 2, K, read), copy=group.rank % max(1, N // K))
        self.output = rows(attention.output, group)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv if self.holders is None else copy_to(self.kv, self.holders)
        return self.products(x, self.group, self.q, kv)


def heads_in(weight: nn.Parameter, blocks: int, heads: int, own: np.ndarray) -> np.ndarray:
    """Return the columns of the heads `own` in weight[C, blocks heads D]."""
    return np.arange(weight.shape[1]).reshape(blocks, heads, -1)[:, own].reshape(-1)
