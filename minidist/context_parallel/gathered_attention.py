"""Gathered attention: every rank gets all keys and values first, and then computes its queries.

Dubey et al., The Llama 3 Herd of Models (2024), section 3.3.2. Letters: N ranks, T positions, of
which a rank has T/N; K heads of keys and values, each read by G of the H = K G query heads.

    KV[2, B, K, T/N, D]        -> all_gather     -> KV[2, B, K, T, D]      attention of own queries
    dKV[2, B, K, T, D]{+N}     -> reduce_scatter -> dKV[2, B, K, T/N, D]

No product starts before the all_gather ends; a ring hides its hops behind products. In return a
query meets all its keys at once: one softmax, no join, and any mask is one device's. A rank
keeps K and V of the whole sequence, 2 T K D numbers, few where queries are grouped.
"""

import math
from collections.abc import Iterator

from minidist.autograd import Function, Tensor
from minidist.autograd.kernels.softmax import causal_softmax, sum_columns
from minidist.autograd.products import batched_matmul, sum_dtype
from minidist.backend import Array, array_module, widen
from minidist.comm import Group
from minidist.context_parallel.ring_attention import block_backward, by_group, for_each
from minidist.context_parallel.tiles import Index, document_tiles
from minidist.context_parallel.ulysses import ROWS, by_rank, in_order
from minidist.pieces import Documents, Positions


class GatherPositions(Function):
    """Forward: all_gather X[..., T/N, D] -> X[..., T, D];  backward: reduce_scatter dX{+N}.

    held  the positions of each rank of the group; X is in the order of the sequence
    """

    def __init__(self, group: Group, held: list[Positions]):
        self.group, self.held = group, held

    def forward(self, x: Array) -> Array:
        xp, sizes = array_module(x), [len(positions) for positions in self.held]
        joined = self.group.all_gather(xp.ascontiguousarray(x), axis=x.ndim + ROWS, label="K, V")
        ends = [sum(sizes[:r]) for r in range(1, len(sizes))]
        return in_order(xp.split(joined, ends, axis=ROWS), self.held)

    def backward(self, grad: Array) -> Array:
        xp, pieces = array_module(grad), by_rank(grad, self.held)
        rows = [xp.moveaxis(piece, ROWS, 0) for piece in pieces]
        sizes = [len(positions) for positions in self.held]
        dx = self.group.reduce_scatter(xp.concatenate(rows), sizes, label="dK, dV")
        return xp.moveaxis(dx, 0, ROWS)


class OwnQueries(Function):
    """O = softmax(Q K^T / sqrt D) V of some positions' queries, over K, V of the whole sequence.

    Input Q[G, B, K, T/N, D], KV[2, B, K, T, D];  O[B, H, T/N, D], H = K G.

    positions  of the queries
    documents  (first, last + 1) of the documents of each example; None: every example is one
    """

    def __init__(self, positions: Positions, documents: Documents | None = None):
        self.positions, self.documents = positions, documents

    def tiles(self) -> Iterator[tuple[Index, Index, int]]:
        """Yield (index of Q, index of K, first): each query is in one tile, with all its keys."""
        sequence = Positions(((0, self.positions.length),), self.positions.length)
        return document_tiles(self.positions, sequence, self.documents)

    def forward(self, q: Array, kv: Array) -> Array:
        xp, (G, B, K, T, D) = array_module(q), q.shape
        self.scale, self.kv, (k, v) = 1 / math.sqrt(D), kv, kv
        self.q, y = q * self.scale, xp.empty((B, T, K * G, D), q.dtype)  # y: as the next layer's X
        self.o = by_group(y.swapaxes(1, 2), G)
        self.log_z = xp.empty((G, B, K, T, 1), sum_dtype(q))
        for rows, keys, first in self.tiles():
            p = batched_matmul(self.q[rows], for_each(q, k[keys]).swapaxes(-1, -2))
            self.log_z[rows] = causal_softmax(p, first)
            p = p.astype(q.dtype, copy=False)
            self.o[rows] = batched_matmul(p, for_each(q, v[keys]))
        return y.swapaxes(1, 2)

    def backward(self, grad: Array) -> tuple[Array, Array]:
        xp, wide, do = array_module(grad), sum_dtype(grad), by_group(grad, len(self.q))
        of_rows = self.q, do, self.log_z, sum_columns(widen(do), self.o)  # <dO, O> = <dP, P>
        dq, dkv = xp.zeros(self.q.shape, wide), xp.zeros(self.kv.shape, wide)
        block_backward(self.tiles(), self.kv, of_rows, dq, dkv)
        dq *= self.scale
        return dq.astype(grad.dtype, copy=False), dkv.astype(grad.dtype, copy=False)


def gathered_attention(
    qkv: Tensor, group: Group, held: list[Positions], documents: Documents | None = None
) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[G + 2, B, K, T/N, D] -> O[B, H, T/N, D].

    documents  (first, last + 1) of each example's documents, in which attention stays; None: one
    """
    kv = GatherPositions(group, held)(qkv[-2:])
    return OwnQueries(held[group.rank], documents)(qkv[:-2], kv)
