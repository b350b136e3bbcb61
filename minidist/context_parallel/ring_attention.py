"""Ring attention: queries stay where they are, keys and values go round.

Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context (2023),
section 3. Letters: N ranks, r this one; T positions, of which r holds T/N; K heads of keys and
values of width D, each read by G of the H = K G query heads. Only keys and values travel, so the
bytes fall by G.

    hop 0   rank r computes with its own K, V, after it has sent them to rank r + 1
    hop i   rank r has K, V of rank r - i;  after N - 1 hops every query has met every key

One hop gives the output O_i and the normaliser Z_i of a softmax over its keys alone. Two of them
are joined exactly:  Z = Z_1 + Z_2,  O = (Z_1 O_1 + Z_2 O_2) / Z,  computed with logarithms of Z.
Backward sends K, V round once more and computes P = exp(scores - log Z) again. It takes <dO, O>,
which needs no other rank, for <dP, P> (Dao et al., FlashAttention, 2022, appendix B.2). dQ is
summed on the rank of Q. dK and dV follow their K, V one hop later: each rank adds its part to the
sum and sends it on, and the last one sends it to the rank of K and V.

Layouts: QKV[G + 2, B, K, T/N, D] -> O[B, H, T/N, D], the positions by any cut. A block is sent on
before it is used, and a send never waits, so that the next transfer travels during the product. A
rank skips keys that none of its queries sees, later keys and keys of other documents, but still
passes them on.
"""

import math
from collections.abc import Iterable, Iterator

from minidist.autograd import Function, Tensor
from minidist.autograd.kernels.softmax import (
    causal_softmax,
    recompute_probabilities,
    scores_backward,
    sum_columns,
)
from minidist.autograd.products import batched_matmul, sum_dtype
from minidist.backend import Array, array_module, widen
from minidist.comm import Group
from minidist.context_parallel.tiles import Index, document_tiles
from minidist.pieces import Documents, Positions

KEYS_VALUES, GRADIENTS = 0, 1  # tags of messages


class RingAttention(Function):
    """O = softmax(Q K^T / sqrt D) V over keys at positions s <= t, wherever those are.

    Forward: K, V make N - 1 hops.  Backward: K, V again, and dK, dV as many.
    held       the positions of each rank of the group
    documents  (first, last + 1) of the documents of each example; None: every example is one
    """

    def __init__(self, group: Group, held: list[Positions], documents: Documents | None = None):
        self.group, self.held, self.documents = group, held, documents

    def forward(self, qkv: Array) -> Array:
        xp, wide, (blocks, B, K, T, D) = array_module(qkv), sum_dtype(qkv), qkv.shape
        self.qkv, self.scale, G = qkv, 1 / math.sqrt(D), blocks - 2
        q, y = qkv[:-2] * self.scale, xp.zeros((B, T, K * G, D), wide).swapaxes(1, 2)
        o, self.log_z = by_group(y, G), xp.full((G, B, K, T, 1), -math.inf, wide)
        for source, (k, v) in self.blocks(qkv[-2:]):
            for rows, keys, first in self.tiles(source):
                p = batched_matmul(q[rows], for_each(q, k[keys]).swapaxes(-1, -2))
                log_z = causal_softmax(p, first)
                part = batched_matmul(p.astype(q.dtype, copy=False), for_each(q, v[keys]))
                join(o[rows], self.log_z[rows], part, log_z)
        y = y.astype(qkv.dtype, copy=False)  # in memory [B, T, H, D]: the next layer's X
        self.o = by_group(y, G)
        return y

    def backward(self, grad: Array) -> Array:
        xp, group, q = array_module(grad), self.group, self.qkv[:-2] * self.scale
        do = by_group(grad, len(q))
        of_rows = q, do, self.log_z, sum_columns(widen(do), self.o)  # <dO, O> = <dP, P>
        dqkv = xp.zeros(self.qkv.shape, sum_dtype(grad))
        for source, kv in self.blocks(self.qkv[-2:]):
            tiles = self.tiles(source)
            if source == group.rank:
                block_backward(tiles, kv, of_rows, dqkv[:-2], dqkv[-2:])
            else:
                dkv = xp.zeros(kv.shape, dqkv.dtype)
                block_backward(tiles, kv, of_rows, dqkv[:-2], dkv)
                self.pass_on(dkv, source)
        if group.size > 1:
            dqkv[-2:] += group.recv((group.rank - 1) % group.size, GRADIENTS)  # they are home
        dqkv[:-2] *= self.scale
        return dqkv.astype(grad.dtype, copy=False)

    def tiles(self, source: int) -> Iterator[tuple[Index, Index, int]]:
        return document_tiles(self.held[self.group.rank], self.held[source], self.documents)

    def blocks(self, kv: Array) -> Iterator[tuple[int, Array]]:
        """Yield (rank, its K and V [2, B, K, T/N, D]) N times, this rank's `kv` first."""
        group, block = self.group, array_module(kv).ascontiguousarray(kv)
        for hop in range(group.size):
            last = hop == group.size - 1
            if not last:
                group.send(block, (group.rank + 1) % group.size, KEYS_VALUES)
            yield (group.rank - hop) % group.size, block
            if not last:
                block = group.recv((group.rank - 1) % group.size, KEYS_VALUES)

    def pass_on(self, dkv: Array, source: int) -> None:
        """Add what earlier ranks have added to dK and dV of `source`, and send the sum on.

        The rank after `source` is the first; the one before it is the last, whose next is `source`.
        """
        group = self.group
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        if before != source:
            dkv += group.recv(before, GRADIENTS)
        group.send(dkv, after, GRADIENTS)


def block_backward(
    tiles: Iterable[tuple[Index, Index, int]],
    kv: Array,
    of_rows: tuple[Array, ...],
    dq: Array,
    dkv: Array,
) -> None:
    """Add what these tiles give to dQ / scale, dK and dV.

    kv       K and V of some positions, [2, B, K, their number, D]
    of_rows  Q scale and dO, [G, B, K, T/N, D], log Z and <dO, O>, [G, B, K, T/N, 1]
    """
    k, v = kv
    for rows, keys, first in tiles:
        q, do, log_z, mean = (x[rows] for x in of_rows)
        p = batched_matmul(q, for_each(q, k[keys]).swapaxes(-1, -2))
        recompute_probabilities(p, log_z, first)
        ds = batched_matmul(do, for_each(q, v[keys]).swapaxes(-1, -2))
        scores_backward(ds, p, mean)
        p, ds = p.astype(q.dtype, copy=False), ds.astype(q.dtype, copy=False)
        batched_matmul(ds, for_each(q, k[keys]), out=dq[rows], add=True)
        dkv[0][keys] += batched_matmul(ds.swapaxes(-1, -2), q).sum(axis=0)  # over the G queries
        dkv[1][keys] += batched_matmul(p.swapaxes(-1, -2), do).sum(axis=0)


def by_group(x: Array, G: int) -> Array:
    """Return X[B, K G, T, D] as [G, B, K, T, D], a view: query head k G + g reads head k."""
    B, H, T, D = x.shape
    return x.reshape(B, H // G, G, T, D).transpose(2, 0, 1, 3, 4)


def for_each(q: Array, x: Array) -> Array:
    """Return X[B, K, s, D] once for each of the G queries Q[G, B, K, n, D] that read it, a view."""
    return array_module(x).broadcast_to(x, (len(q), *x.shape))


def join(o: Array, log_z: Array, part: Array, part_log_z: Array) -> None:
    """Overwrite O[..., n, D] and log Z[..., n, 1] by the softmax over their keys and more keys.

    part, part_log_z  O and log Z over the other keys alone; log_z is -inf where there was no key
    """
    xp = array_module(o)
    largest = xp.maximum(log_z, part_log_z)  # then z is between 1 and 2
    before, now = xp.exp(log_z - largest), xp.exp(part_log_z - largest)
    z = before + now
    o *= before / z
    o += part * (now / z)
    log_z[...] = largest + xp.log(z)


def ring_attention(
    qkv: Tensor, group: Group, held: list[Positions], documents: Documents | None = None
) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[G + 2, B, K, T/N, D] -> O[B, H, T/N, D].

    documents  (first, last + 1) of each example's documents, in which attention stays; None: one
    """
    return RingAttention(group, held, documents)(qkv)
