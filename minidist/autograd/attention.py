"""Causal attention on one device: every position attends to itself and to earlier positions.

    O = P V,  P = softmax(Q K^T / sqrt D) over positions s <= t      (Vaswani et al. 2017, eq. 1)

One function in two forms. `CausalAttention` is the definition: it computes all T x T scores of a
head at once, and keeps P. `BlockwiseAttention` holds T x 64 of them at a time and keeps one number
per query, so that memory grows with T and not with T^2. `causal_attention` chooses.
Letters: B batch, T positions, H heads, D head width, S scores, Z[B, H, T, 1] a softmax's sum.
"""

import math

from minidist.autograd.functions import sum_columns
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, matmul, wide_matmul, widen

WHOLE = 128  # positions up to which P is kept: on a CPU, to compute it again takes longer there
BLOCK = 64  # positions of a block


class CausalAttention(Function):
    """O = P V, all scores at once.  Input QKV[3, B, H, T, D], the three stacked; O[B, H, T, D].

    dV = P^T dO,  dP = dO V^T,  dS = P (dP - <dP, P>),  dQ = dS K / sqrt D,  dK = dS^T Q / sqrt D.
    """

    def forward(self, qkv: Array) -> Array:
        self.q, self.k, self.v = q, k, v = qkv
        self.scale = 1 / math.sqrt(q.shape[-1])
        p = wide_matmul(q * self.scale, transposed(k))
        softmax_of_seen(p, 0)
        self.p = p.astype(q.dtype, copy=False)
        return matmul(self.p, v, out=empty_output(q))

    def backward(self, grad: Array) -> Array:
        q, k, v, p = self.q, self.k, self.v, self.p
        dqkv = empty_gradient(q)
        wide_matmul(p.swapaxes(-1, -2), grad, out=dqkv[2])
        ds = wide_matmul(grad, transposed(v))
        ds -= sum_columns(ds * p)
        ds *= p
        ds *= self.scale
        ds = ds.astype(q.dtype, copy=False)
        wide_matmul(ds, k, out=dqkv[0])
        wide_matmul(ds.swapaxes(-1, -2), q, out=dqkv[1])
        return dqkv.astype(grad.dtype, copy=False)


class BlockwiseAttention(Function):
    """The same, a block of positions at a time; it keeps Q, K, V, O and log Z.

    Dao et al., FlashAttention, 2022: backward computes P again, as exp(S - log Z), and takes
    <dO, O> for <dP, P> (appendix B.2). Here a block of queries meets all its keys at once, so that
    no partial result is rescaled. In backward a block of keys meets all its queries; only dQ is a
    sum over blocks.
    """

    def forward(self, qkv: Array) -> Array:
        self.q, self.k, self.v = q, k, v = qkv
        self.scale = 1 / math.sqrt(q.shape[-1])
        qs, kt = q * self.scale, transposed(k)
        self.o = empty_output(q)
        self.log_z = array_module(q).empty((*q.shape[:-1], 1), widen(q[:0]).dtype)
        for a, b in blocks(q.shape[-2]):
            p = wide_matmul(qs[..., a:b, :], kt[..., :b])  # [B, H, b - a, b]
            self.log_z[..., a:b, :] = softmax_of_seen(p, a)
            matmul(p.astype(q.dtype, copy=False), v[..., :b, :], out=self.o[..., a:b, :])
        return self.o

    def backward(self, grad: Array) -> Array:
        q, k, v, xp = self.q, self.k, self.v, array_module(grad)
        qs, kt, vt = q * self.scale, transposed(k), transposed(v)
        mean = sum_columns(widen(grad) * self.o)  # of dP, by P
        dq, dk, dv = dqkv = empty_gradient(q)
        dq.fill(0)
        for a, b in blocks(q.shape[-2]):
            p = wide_matmul(qs[..., a:, :], kt[..., a:b])  # [B, H, T - a, b - a]
            hide_later(p, 0)
            p -= self.log_z[..., a:, :]
            xp.exp(p, out=p)
            ds = wide_matmul(grad[..., a:, :], vt[..., a:b])
            ds -= mean[..., a:, :]
            ds *= p
            p, ds = p.astype(q.dtype, copy=False), ds.astype(q.dtype, copy=False)
            wide_matmul(p.swapaxes(-1, -2), grad[..., a:, :], out=dv[..., a:b, :])
            wide_matmul(ds.swapaxes(-1, -2), qs[..., a:, :], out=dk[..., a:b, :])
            dq[..., a:, :] += wide_matmul(ds, k[..., a:b, :])
        dq *= self.scale
        return dqkv.astype(grad.dtype, copy=False)


def causal_attention(qkv: Tensor) -> Tensor:
    """Attend to the same and to earlier positions: QKV[3, B, H, T, D] -> O[B, H, T, D]."""
    if qkv.ndim != 5 or qkv.shape[0] != 3:
        raise ValueError(f"causal_attention takes [3, B, H, T, D], got {list(qkv.shape)}")
    return (CausalAttention if 0 < qkv.shape[3] <= WHOLE else BlockwiseAttention)()(qkv)


def kept_scores(T: int) -> int:
    """Return how many numbers per head `causal_attention` keeps besides Q, K, V and O."""
    return T * T if T <= WHOLE else T


def computed_scores(T: int) -> int:
    """Return how many scores per head its forward pass computes, masked ones included."""
    return T * T if T <= WHOLE else sum((b - a) * b for a, b in blocks(T))


def blocks(T: int) -> list[tuple[int, int]]:
    """Return each block's first position and the one after its last; the last may be shorter."""
    return [(a, min(a + BLOCK, T)) for a in range(0, T, BLOCK)]


def softmax_of_seen(scores: Array, first: int) -> Array:
    """Overwrite S[..., n, s] with its softmax over the keys that are seen; return log Z[..., n, 1].

    Query i is at position `first` + i.
    """
    xp = array_module(scores)
    hide_later(scores, first)
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    z = sum_columns(xp.exp(scores, out=scores))
    scores /= z
    return largest + xp.log(z, out=z)


def hide_later(scores: Array, first: int) -> None:
    """Set the scores of keys later than their query to -inf; query i is at `first` + i.

    They are a triangle that ends with the last column; nothing else is touched.
    """
    n = scores.shape[-1] - first
    xp, square = array_module(scores), scores[..., :n, first:]
    square += xp.triu(xp.full((n, n), -xp.inf, scores.dtype), 1)  # a query sees its own position


def transposed(x: Array) -> Array:
    """Return X^T, copied: a product of small matrices is faster on a CPU if rows are contiguous."""
    return array_module(x).ascontiguousarray(x.swapaxes(-1, -2))


def empty_output(q: Array) -> Array:
    """Return O[B, H, T, D], in memory [B, T, H, D]: the next layer keeps it too, as X[B, T, C]."""
    B, H, T, D = q.shape
    return array_module(q).empty((B, T, H, D), q.dtype).transpose(0, 2, 1, 3)


def empty_gradient(q: Array) -> Array:
    """Return dQKV[3, B, H, T, D], in memory [B, T, 3, H, D]: dY[B, T, 3 C] of the layer before."""
    B, H, T, D = q.shape
    return array_module(q).empty((B, T, 3, H, D), widen(q[:0]).dtype).transpose(2, 0, 3, 1, 4)
