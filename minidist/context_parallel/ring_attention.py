"""Ring attention: queries stay where they are, keys and values go round.

Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context (2023),
section 3. Letters: N ranks, r this one; T positions, of which r holds T/N; H heads of width D.

    hop 0   rank r computes with its own K, V, after it has sent them to rank r + 1
    hop i   rank r has K, V of rank r - i;  after N - 1 hops every query has met every key

One hop gives the output O_i and the normaliser Z_i of a softmax over its keys alone. Two of them
are joined exactly:  Z = Z_1 + Z_2,  O = (Z_1 O_1 + Z_2 O_2) / Z,  computed with logarithms of Z.
Backward sends K, V round once more and computes P = exp(scores - log Z) again. It takes <dO, O>,
which needs no other rank, for <dP, P> (Dao et al., FlashAttention, 2022, appendix B.2). dQ is
summed on the rank of Q. dK and dV follow their K, V one hop later: each rank adds its part to the
sum and sends it on, and the last one sends it to the rank of K and V.

Layouts: QKV[3, B, H, T/N, D] -> O[B, H, T/N, D], the positions by any cut. A block is sent on
before it is used, and a send never waits, so that the next transfer travels during the product. A
rank skips keys that are later than all its queries, but still passes them on.
"""

import math
from collections.abc import Iterator

from minidist.autograd import Function, Tensor
from minidist.autograd.kernels import (
    causal_softmax,
    recompute_probabilities,
    scores_backward,
    sum_columns,
)
from minidist.autograd.products import batched_matmul, sum_dtype
from minidist.backend import Array, array_module, widen
from minidist.comm import Group
from minidist.context_parallel.tiles import tiles
from minidist.pieces import Positions

KEYS_VALUES, GRADIENTS = 0, 1  # tags of messages


class RingAttention(Function):
    """O = softmax(Q K^T / sqrt D) V over keys at positions s <= t, wherever those are.

    Forward: K, V make N - 1 hops.  Backward: K, V again, and dK, dV as many.
    held  the positions of each rank of the group
    """

    def __init__(self, group: Group, held: list[Positions]):
        self.group, self.held = group, held

    def forward(self, qkv: Array) -> Array:
        xp, wide, (_, B, H, T, D) = array_module(qkv), sum_dtype(qkv), qkv.shape
        self.qkv, self.scale = qkv, 1 / math.sqrt(D)
        q = qkv[0] * self.scale
        o = xp.zeros((B, T, H, D), wide).transpose(0, 2, 1, 3)  # in memory as the next layer's X
        self.log_z = xp.full((B, H, T, 1), -math.inf, wide)
        for source, (k, v) in self.blocks(qkv[1:]):
            for rows, keys, first in self.tiles(source):
                p = batched_matmul(q[..., rows, :], k[..., keys, :].swapaxes(-1, -2))
                log_z = causal_softmax(p, first)
                part = batched_matmul(p.astype(q.dtype, copy=False), v[..., keys, :])
                join(o[..., rows, :], self.log_z[..., rows, :], part, log_z)
        self.o = o.astype(qkv.dtype, copy=False)
        return self.o

    def backward(self, grad: Array) -> Array:
        xp, group, q = array_module(grad), self.group, self.qkv[0] * self.scale
        of_rows = q, grad, sum_columns(widen(grad) * self.o)  # <dO, O> = <dP, P>
        dqkv = xp.zeros(self.qkv.shape, sum_dtype(grad))
        for source, kv in self.blocks(self.qkv[1:]):
            if source == group.rank:
                self.block_backward(source, kv, of_rows, dqkv[0], dqkv[1:])
            else:
                dkv = xp.zeros(kv.shape, dqkv.dtype)
                self.block_backward(source, kv, of_rows, dqkv[0], dkv)
                self.pass_on(dkv, source)
        if group.size > 1:
            dqkv[1:] += group.recv((group.rank - 1) % group.size, GRADIENTS)  # they are home
        dqkv[0] *= self.scale
        return dqkv.astype(grad.dtype, copy=False)

    def block_backward(
        self, source: int, kv: Array, of_rows: tuple[Array, ...], dq: Array, dkv: Array
    ) -> None:
        """Add what this rank's queries and the keys of `source` give to dQ / scale, dK and dV.

        kv       K and V of `source`, [2, B, H, its positions, D]
        of_rows  Q scale and dO, [B, H, T/N, D], and <dO, O>, [B, H, T/N, 1]
        """
        k, v = kv
        for rows, keys, first in self.tiles(source):
            q, do, mean = (x[..., rows, :] for x in of_rows)
            p = batched_matmul(q, k[..., keys, :].swapaxes(-1, -2))
            recompute_probabilities(p, self.log_z[..., rows, :], first)
            ds = batched_matmul(do, v[..., keys, :].swapaxes(-1, -2))
            scores_backward(ds, p, mean)
            p, ds = p.astype(q.dtype, copy=False), ds.astype(q.dtype, copy=False)
            batched_matmul(ds, k[..., keys, :], out=dq[..., rows, :], add=True)
            batched_matmul(ds.swapaxes(-1, -2), q, out=dkv[0][..., keys, :], add=True)
            batched_matmul(p.swapaxes(-1, -2), do, out=dkv[1][..., keys, :], add=True)

    def tiles(self, source: int) -> Iterator[tuple[slice, slice, int]]:
        return tiles(self.held[self.group.rank], self.held[source])

    def blocks(self, own: Array) -> Iterator[tuple[int, Array]]:
        """Yield (rank, its K and V [2, B, H, T/N, D]) N times, this rank's own first."""
        group, block = self.group, array_module(own).ascontiguousarray(own)
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


def ring_attention(qkv: Tensor, group: Group, held: list[Positions]) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[3, B, H, T/N, D] -> O[B, H, T/N, D]."""
    return RingAttention(group, held)(qkv)
