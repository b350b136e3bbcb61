"""Grouped queries split by heads; there may be fewer heads of keys and values than ranks.

Ainslie et al., GQA (2023), section 2.2; Shoeybi et al., Megatron-LM (2019), section 3. Letters: N
ranks, H query heads, K heads of keys and values, D head width.

    X[B, T, C] -> f -> X W_q of H/N heads, X W_kv of K/N -> attention -> rows of W_o -> g

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
from minidist.tensor_parallel.column_parallel import own_run
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.whole import columns_of


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
        own = own_run(H, group, "heads")
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
        read = np.unique(own // (H // K))  # the heads of keys and values that these queries read
        self.group, self.products, self.attend = group, products, attention.attend
        self.heads, self.kv_heads, self.theta = len(own), len(read), attention.theta
        self.holders = holders or holders_of(group, K)
        q, kv = attention.query.weight, attention.key_value.weight
        self.q = columns_of(q, heads_in(q, 1, H, own))
        self.kv = columns_of(kv, heads_in(kv, 2, K, read), copy=group.rank % max(1, N // K))
        self.output = rows(attention.output, group)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv if self.holders is None else copy_to(self.kv, self.holders)
        return self.products(x, self.group, self.q, kv)


def heads_in(weight: nn.Parameter, blocks: int, heads: int, own: np.ndarray) -> np.ndarray:
    """Return the columns of these heads in weight[C, blocks heads D]."""
    return np.arange(weight.shape[1]).reshape(blocks, heads, -1)[:, own].reshape(-1)
