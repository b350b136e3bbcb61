"""What is normalised along a row: softmax, attention, cross-entropy.

Letters: B batch, T sequence, H heads, D head width, V vocabulary. Each row is shifted by its own
maximum before exp, so rows that are far apart, and logits of 1e4, neither overflow nor vanish.
"""

import math

import numpy as np

from minidist.autograd.functions import check_indices, reduction_size_or
from minidist.autograd.tensor import Function
from minidist.backend import array_module, to_device, widen


class Softmax(Function):
    """Y = exp(X - max X) / sum, per row  =>  dX = Y (dY - <dY, Y>).  The maximum is the row's own,
    so no row underflows.
    """

    def __init__(self, axis=-1):
        self.axis = axis

    def forward(self, x):
        wide = widen(x)
        y = array_module(x).exp(wide - wide.max(axis=self.axis, keepdims=True))
        y /= y.sum(axis=self.axis, keepdims=True)
        self.y = y.astype(x.dtype, copy=False)
        return self.y

    def backward(self, grad):
        y, wide = widen(self.y), widen(grad)
        dx = y * (wide - (wide * y).sum(axis=self.axis, keepdims=True))
        return dx.astype(grad.dtype, copy=False)


class LogSoftmax(Function):
    """Y = X - max X - log sum exp(X - max X), per row  =>  dX = dY - exp(Y) sum dY."""

    def __init__(self, axis=-1):
        self.axis = axis

    def forward(self, x):
        xp, wide = array_module(x), widen(x)
        shifted = wide - wide.max(axis=self.axis, keepdims=True)
        self.y = shifted - xp.log(xp.exp(shifted).sum(axis=self.axis, keepdims=True))
        return self.y.astype(x.dtype, copy=False)

    def backward(self, grad):
        wide = widen(grad)
        dx = wide - array_module(grad).exp(self.y) * wide.sum(axis=self.axis, keepdims=True)
        return dx.astype(grad.dtype, copy=False)


class CausalAttention(Function):
    """O = P V, P = softmax(Q K^T / sqrt D) over positions s <= t (Vaswani et al. 2017, equation 1,
    masked).

    Input QKV[3, B, H, T, D], the three stacked; output O[B, H, T, D].
    dV = P^T dO,  dP = dO V^T,  dS = P (dP - <dP, P>),  dQ = dS K / sqrt D,  dK = dS^T Q / sqrt D.
    """

    def forward(self, qkv):
        xp = array_module(qkv)
        q, k, v = widen(qkv)
        T, D = q.shape[-2:]
        self.scale = 1 / math.sqrt(D)
        scores = q @ xp.ascontiguousarray(k.swapaxes(-1, -2))
        scores *= self.scale
        scores += xp.triu(
            xp.full((T, T), -xp.inf, scores.dtype), 1
        )  # a position always sees itself
        scores -= scores.max(axis=-1, keepdims=True)
        p = xp.exp(scores, out=scores)
        p /= p @ xp.ones((T, 1), p.dtype)
        self.q, self.k, self.v, self.p = q, k, v, p
        return (p @ v).astype(qkv.dtype, copy=False)

    def backward(self, grad):
        xp, q, k, v, p = array_module(grad), self.q, self.k, self.v, self.p
        wide = widen(grad)
        dqkv = xp.empty((3, *q.shape), q.dtype)
        xp.matmul(p.swapaxes(-1, -2), wide, out=dqkv[2])
        ds = wide @ xp.ascontiguousarray(v.swapaxes(-1, -2))
        ds -= (ds * p) @ xp.ones((p.shape[-1], 1), p.dtype)
        ds *= p
        ds *= self.scale
        xp.matmul(ds, k, out=dqkv[0])
        xp.matmul(ds.swapaxes(-1, -2), q, out=dqkv[1])
        return dqkv.astype(grad.dtype, copy=False)


class CrossEntropy(Function):
    """L = sum of -log softmax(X)[target] / n  =>  dX = (softmax(X) - onehot(target)) dL / n;
    X[..., V].
    """

    def __init__(self, targets, reduction_size):
        self.targets, self.reduction_size = targets, reduction_size

    def forward(self, logits):
        xp, wide = array_module(logits), widen(logits)
        rows = wide.reshape(-1, logits.shape[-1])
        targets = to_device(self.targets.reshape(-1), "cpu" if xp is np else "gpu")
        shifted = rows - rows.max(axis=-1, keepdims=True)
        self.picked = (xp.arange(len(rows)), targets)
        picked = shifted[self.picked]
        probabilities = xp.exp(shifted, out=shifted)
        sums = probabilities @ xp.ones((rows.shape[-1], 1), rows.dtype)
        probabilities /= sums
        self.probabilities, self.shape = probabilities, logits.shape
        loss = (xp.log(sums[:, 0]) - picked).sum() / self.reduction_size
        return loss.astype(logits.dtype)

    def backward(self, grad):
        dx = self.probabilities
        dx[self.picked] -= 1
        dx *= widen(grad) / self.reduction_size
        return dx.reshape(self.shape).astype(grad.dtype, copy=False)


def softmax(x, axis=-1):
    return Softmax(axis)(x)


def log_softmax(x, axis=-1):
    return LogSoftmax(axis)(x)


def causal_attention(qkv):
    """Attend from every position to itself and those before it: QKV[3, B, H, T, D] -> O[B, H, T,
    D].
    """
    if qkv.ndim != 5 or qkv.shape[0] != 3:
        raise ValueError(f"causal_attention takes [3, B, H, T, D], got {list(qkv.shape)}")
    return CausalAttention()(qkv)


def cross_entropy(logits, targets, reduction_size=None):
    """Sum of -log softmax(logits[..., V])[targets[...]], divided by `reduction_size` (default: the
    number of targets).
    """
    targets = check_indices(targets, "target")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits {list(logits.shape)} need targets {list(logits.shape[:-1])}, got "
            f"{list(targets.shape)}"
        )
    if targets.size and targets.max() >= logits.shape[-1]:
        raise ValueError(
            f"target {targets.max()} is outside the {logits.shape[-1]} classes of the logits"
        )
    return CrossEntropy(targets, reduction_size_or(targets, reduction_size))(logits)
