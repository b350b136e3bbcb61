"""Attention on one device: to the same and to earlier positions, or to another sequence.

    O = P V,  P = softmax(Q K^T / sqrt D) over positions s <= t      (Vaswani et al. 2017, eq. 1)

One function in two forms. `CausalAttention` is the definition: it computes all T x T scores of a
head at once, and keeps P. `BlockwiseAttention` holds T x 64 of them at a time (256 on a GPU) and
keeps one number per query, so that memory grows with T and not with T^2. Unlike FlashAttention it
saves memory, not traffic: on a GPU a block's scores are written and read again between kernels.
`causal_attention` chooses. `PaddedAttention` has keys and values of another sequence, some of whose
positions are padding. `document_attention` sees no other document of a window.
Letters: B batch, T positions, S of the other sequence, H heads, D head width, Z[B, H, T, 1] a
softmax's sum; K heads of keys and values, each read by G of the H query heads.
"""

import math

from minidist.autograd import functions
from minidist.autograd.kernels.softmax import (
    causal_softmax,
    padded_softmax,
    recompute_probabilities,
    scores_backward,
    sum_columns,
)
from minidist.autograd.products import batched_matmul, sum_dtype
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, on_device_of, on_gpu, sum_over, widen
from minidist.errors import WrongInput
from minidist.pieces import BLOCK, GPU_BLOCK, Documents, blocks, in_one_piece


class CausalAttention(Function):
    """O = P V, all scores at once.  Input QKV[3, B, H, T, D], the three stacked; O[B, H, T, D].

    dV = P^T dO,  dP = dO V^T,  dS = P (dP - <dP, P>),  dQ = dS K / sqrt D,  dK = dS^T Q / sqrt D.
    """

    def forward(self, qkv: Array) -> Array:
        self.q, self.k, self.v = q, k, v = for_cublas(qkv)
        self.scale = 1 / math.sqrt(q.shape[-1])
        p = batched_matmul(q * self.scale, transposed(k))
        causal_softmax(p, 0)
        self.p = p.astype(q.dtype, copy=False)
        return batched_matmul(self.p, v, out=empty_output(q))

    def backward(self, grad: Array) -> Array:
        q, k, v, p, grad = self.q, self.k, self.v, self.p, for_cublas(grad)
        dq, dk, dv = dqkv = empty_gradient(q)
        batched_matmul(transposed(p), grad, out=dv)
        ds = batched_matmul(grad, transposed(v))
        scores_backward(ds, p, scale=self.scale)
        ds = ds.astype(q.dtype, copy=False)
        batched_matmul(ds, k, out=dq)
        batched_matmul(transposed(ds), q, out=dk)
        return dqkv.astype(grad.dtype, copy=False)


class BlockwiseAttention(Function):
    """Causal attention, a block of positions at a time; it keeps Q, K, V, O and log Z.

    Dao et al., FlashAttention, 2022: backward computes P again, and takes <dO, O> for <dP, P>
    (appendix B.2); P = exp(scores - log Z) as in FlashAttention-2 (Dao 2023, section 3.1). Here a
    block of queries meets all its keys at once, so that no partial result is rescaled. In backward
    a block of keys meets all its queries; only dQ is a sum over blocks.
    """

    def forward(self, qkv: Array) -> Array:
        self.q, self.k, self.v = q, k, v = for_cublas(qkv)
        self.scale = 1 / math.sqrt(q.shape[-1])
        scaled, kt, self.o = q * self.scale, transposed(k), empty_output(q)
        self.log_z = array_module(q).empty((*q.shape[:-1], 1), sum_dtype(q))
        for a, b in blocks_of(q):
            p = batched_matmul(scaled[..., a:b, :], kt[..., :b])  # [B, H, b - a, b]
            self.log_z[..., a:b, :] = causal_softmax(p, a)
            p = p.astype(q.dtype, copy=False)
            batched_matmul(p, v[..., :b, :], out=self.o[..., a:b, :])
        return self.o

    def backward(self, grad: Array) -> Array:
        q, k, v, grad = self.q, self.k, self.v, for_cublas(grad)
        mean = sum_columns(widen(grad), self.o)  # <dO, O> = <dP, P>
        dq, dk, dv = dqkv = empty_gradient(q)
        scaled, kt, vt = q * self.scale, transposed(k), transposed(v)
        for a, b in blocks_of(q):
            p = batched_matmul(scaled[..., a:, :], kt[..., a:b])  # [B, H, T - a, b - a]
            recompute_probabilities(p, self.log_z[..., a:, :])
            ds = batched_matmul(grad[..., a:, :], vt[..., a:b])
            scores_backward(ds, p, mean[..., a:, :])
            p, ds = p.astype(q.dtype, copy=False), ds.astype(q.dtype, copy=False)
            batched_matmul(transposed(p), grad[..., a:, :], out=dv[..., a:b, :])
            batched_matmul(transposed(ds), scaled[..., a:, :], out=dk[..., a:b, :])
            batched_matmul(ds, k[..., a:b, :], out=dq[..., a:, :], add=a > 0)
        dq *= self.scale
        return dqkv.astype(grad.dtype, copy=False)


class RepeatedHeads(Function):
    """QKV[G + 2, B, K, T, D] -> [G/s + 2, B, K s, T, D]: each head of keys and values s times.

    Copy j is read by the j-th part of the head's G queries. dK and dV are sums over the s copies.

    copies  s, a divisor of G; by default G: one for each query
    """

    def __init__(self, copies: int | None = None):
        self.copies = copies

    def forward(self, qkv: Array) -> Array:
        self.shape, (blocks, B, K, T, D) = qkv.shape, qkv.shape
        s = self.s = self.copies or blocks - 2
        y = array_module(qkv).empty(((blocks - 2) // s + 2, B, K, s, T, D), qkv.dtype)
        y[:-2] = qkv[:-2].reshape(s, len(y) - 2, B, K, T, D).transpose(1, 2, 3, 0, 4, 5)
        y[-2:] = qkv[-2:, :, :, None]
        return y.reshape(len(y), B, K * s, T, D)

    def backward(self, grad: Array) -> Array:
        blocks, B, K, T, D = self.shape
        grad = grad.reshape(len(grad), B, K, self.s, T, D)
        dqkv = array_module(grad).empty(self.shape, grad.dtype)
        dqkv[:-2] = grad[:-2].transpose(3, 0, 1, 2, 4, 5).reshape(blocks - 2, B, K, T, D)
        dqkv[-2:] = sum_over(grad[-2:], axis=3)
        return dqkv


class PaddedAttention(Function):
    """O = P V over the keys that are held.  Input Q[B, H, T, D], KV[2, B, H, S, D]; O[B, H, T, D].

    dQ, dK, dV as above. Where no key of an example is held, P and O are 0.

    held[B, S]  False where a key is padding
    """

    def __init__(self, held: Array):
        self.held = held

    def forward(self, q: Array, kv: Array) -> Array:
        self.q, (self.k, self.v) = for_cublas(q), for_cublas(kv)
        self.scale = 1 / math.sqrt(q.shape[-1])
        p = batched_matmul(self.q * self.scale, transposed(self.k))
        padded_softmax(p, on_device_of(self.held, p))
        self.p = p.astype(q.dtype, copy=False)
        return batched_matmul(self.p, self.v, out=empty_output(q))

    def backward(self, grad: Array) -> tuple[Array, Array]:
        (B, H, S, D), grad = self.k.shape, for_cublas(grad)
        ds = batched_matmul(grad, transposed(self.v))
        scores_backward(ds, self.p, scale=self.scale)
        ds = ds.astype(self.q.dtype, copy=False)
        dq = batched_matmul(ds, self.k, out=empty_output(self.q))
        xp = array_module(grad)
        dkv = xp.empty((2, B, H, S, D), sum_dtype(grad))
        batched_matmul(transposed(ds), self.q, out=dkv[0])
        batched_matmul(transposed(self.p), grad, out=dkv[1])
        return dq.astype(grad.dtype, copy=False), dkv.astype(grad.dtype, copy=False)


def causal_attention(qkv: Tensor) -> Tensor:
    """Attend to the same and to earlier positions: QKV[3, B, H, T, D] -> O[B, H, T, D].

    QKV[G + 2, B, K, T, D]: G queries share each head of keys and values, the last two; H = K G.
    """
    if qkv.ndim != 5 or qkv.shape[0] < 3:
        raise WrongInput(f"causal_attention takes [G + 2, B, K, T, D], got {list(qkv.shape)}")
    qkv, T = RepeatedHeads()(qkv) if qkv.shape[0] > 3 else qkv, qkv.shape[3]
    return (CausalAttention if T > 0 and in_one_piece(T) else BlockwiseAttention)()(qkv)


def padded_attention(q: Tensor, kv: Tensor, held: Array) -> Tensor:
    """Attend to the keys that are held: Q[B, H, T, D], KV[2, B, H, S, D] -> O[B, H, T, D]."""
    if q.ndim != 4 or kv.shape[:3] != (2, *q.shape[:2]) or kv.shape[4:] != q.shape[3:]:
        raise WrongInput(
            f"padded_attention takes [B, H, T, D] and [2, B, H, S, D], got {list(q.shape)} and "
            f"{list(kv.shape)}"
        )
    if held.shape != (kv.shape[1], kv.shape[3]):
        raise WrongInput(
            f"keys {list(kv.shape)} need held [{kv.shape[1]}, {kv.shape[3]}], "
            f"got {list(held.shape)}"
        )
    return PaddedAttention(held)(q, kv)


def blocks_of(q: Array) -> list[tuple[int, int]]:
    return blocks(q.shape[-2], GPU_BLOCK if on_gpu(q) else BLOCK)


def for_cublas(x: Array) -> Array:
    """Return X[..., B, H, T, D], contiguous on a GPU: then cuBLAS reads blocks where they are."""
    return array_module(x).ascontiguousarray(x) if on_gpu(x) else x


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def empty_output(q: Array) -> Array:
    """Return O[B, H, T, D], in memory [B, T, H, D]: the next layer keeps it too, as X[B, T, C]."""
    B, H, T, D = q.shape
    return array_module(q).empty((B, T, H, D), q.dtype).transpose(0, 2, 1, 3)


def empty_gradient(q: Array) -> Array:
    """Return dQKV[3, B, H, T, D]; on a CPU in memory [B, T, 3, H, D]: dY of the layer before."""
    xp, (B, H, T, D) = array_module(q), q.shape
    if on_gpu(q):
        return xp.empty((3, B, H, T, D), sum_dtype(q))
    return xp.empty((B, T, 3, H, D), sum_dtype(q)).transpose(2, 0, 3, 1, 4)


def document_attention(qkv: Tensor, documents: Documents | None) -> Tensor:
    """Attend to earlier positions of the same document: QKV[G + 2, B, K, T, D] -> O[B, H, T, D].

    documents  (first, last + 1) of each window's documents, all T positions; None: one a window
    """
    if not documents:
        return causal_attention(qkv)
    windows = [qkv[:, i : i + 1] for i in range(len(documents))]
    attended = [
        functions.concatenate([causal_attention(one[..., a:b, :]) for a, b in runs], axis=2)
        for one, runs in zip(windows, documents, strict=True)
    ]
    return functions.concatenate(attended)
