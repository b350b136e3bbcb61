"""Causal attention on one device: every position attends to itself and to earlier positions.

Letters: B batch, T sequence, H heads, D head width. P holds T x T numbers per head, and is kept.
"""

import math

from minidist.autograd.functions import sum_columns
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, widen


class CausalAttention(Function):
    """O = P V, P = softmax(Q K^T / sqrt D) over positions s <= t.

    Vaswani et al. 2017, equation 1, masked.
    Input QKV[3, B, H, T, D], the three stacked; output O[B, H, T, D].
    dV = P^T dO,  dP = dO V^T,  dS = P (dP - <dP, P>),  dQ = dS K / sqrt D,  dK = dS^T Q / sqrt D.
    """

    def forward(self, qkv: Array) -> Array:
        xp = array_module(qkv)
        q, k, v = widen(qkv)
        T, D = q.shape[-2:]
        self.scale = 1 / math.sqrt(D)
        scores = q @ xp.ascontiguousarray(k.swapaxes(-1, -2))
        scores *= self.scale
        scores += xp.triu(xp.full((T, T), -xp.inf, scores.dtype), 1)  # s = t stays visible
        scores -= scores.max(axis=-1, keepdims=True)
        p = xp.exp(scores, out=scores)
        p /= sum_columns(p)
        self.q, self.k, self.v, self.p = q, k, v, p
        return (p @ v).astype(qkv.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        xp, q, k, v, p = array_module(grad), self.q, self.k, self.v, self.p
        wide = widen(grad)
        dqkv = xp.empty((3, *q.shape), q.dtype)
        xp.matmul(p.swapaxes(-1, -2), wide, out=dqkv[2])
        ds = wide @ xp.ascontiguousarray(v.swapaxes(-1, -2))
        ds -= sum_columns(ds * p)
        ds *= p
        ds *= self.scale
        xp.matmul(ds, k, out=dqkv[0])
        xp.matmul(ds.swapaxes(-1, -2), q, out=dqkv[1])
        return dqkv.astype(grad.dtype, copy=False)


def causal_attention(qkv: Tensor) -> Tensor:
    """Attend to the same and to earlier positions: QKV[3, B, H, T, D] -> O[B, H, T, D]."""
    if qkv.ndim != 5 or qkv.shape[0] != 3:
        raise ValueError(f"causal_attention takes [3, B, H, T, D], got {list(qkv.shape)}")
    return CausalAttention()(qkv)
