"""Sums over rows and columns; softmax of attention's scores, and cross-entropy.

On a GPU sums are reductions, and a row of scores is read twice. On a CPU sums are products of
vectors: BLAS is several times faster than a reduction along short rows.
"""

import math

import numpy as np

from minidist.autograd.kernels.launch import Elementwise, Reduction
from minidist.backend import Array, array_module, matmul, on_gpu, sum_over, widen


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """Sum X[N, C] over its rows."""
    if on_gpu(x):
        return sum_over(x, axis=0, out=out)
    return matmul(np.ones(len(x), x.dtype), x, out=out)


def sum_columns(x: Array, y: Array | None = None) -> Array:
    """Sum X[..., C], or X Y, over the last axis, kept with length 1."""
    if on_gpu(x):
        return sum_over(x if y is None else x * y, axis=-1, keepdims=True)
    if y is not None:
        return np.vecdot(x, y)[..., None]
    ones = np.ones((x.shape[-1], 1), x.dtype)
    return (x.reshape(-1, x.shape[-1]) @ ones).reshape(*x.shape[:-1], 1)


def mean_columns(x: Array, y: Array | None = None) -> Array:
    return sum_columns(x, y) / x.shape[-1]


_sum_rows_of_product = Reduction(
    "sum_rows_of_product", "T x, T y", "T total", "x * y", "a + b", "total = a", axis=0
)


def sum_rows_of_product(x: Array, y: Array, out: Array | None = None) -> Array:
    """Sum X Y over all axes but the last."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return _sum_rows_of_product(x, y, out=out) if on_gpu(x) else sum_rows(x * y, out=out)


# A row's maximum and the sum of exp(x - maximum), in one pass (Milakov and Gimelshein 2018, section
# 3.1: `join` is their operator on two parts of a row), and log Z, Z the sum of exp(x).
_softmax_sums = Reduction(
    "softmax_sums",
    "T x",
    "T peak, T total, T log_z",
    each="Exponentials{x, 1}",
    combine="join(a, b)",
    finish="peak = a.peak, total = a.total, log_z = a.peak + log(a.total)",
    identity="Exponentials{-T(1) / T(0), 0}",
    kind="Exponentials",
    preamble="""
struct Exponentials { T peak, total; };
__device__ Exponentials join(Exponentials x, Exponentials y) {
    T peak = x.peak > y.peak ? x.peak : y.peak;
    T left = x.peak == peak ? T(1) : exp(x.peak - peak);
    T right = y.peak == peak ? T(1) : exp(y.peak - peak);
    return Exponentials{peak, x.total * left + y.total * right};
}""",
)
_softmax = Elementwise("softmax", "T peak, T total", "T x", "x = exp(x - peak) / total")
_causal_mask = Elementwise(
    "causal_mask",
    "int64 queries, int64 keys, int64 first, T hidden",
    "T x",
    "if (i % keys > first + i / keys % queries) x = hidden",
)
_recompute_probabilities = Elementwise(
    "recompute_probabilities",
    "T log_z, int64 queries, int64 keys, int64 first",
    "T x",
    "x = i % keys > first + i / keys % queries ? T(0) : exp(x - log_z)",
)
_products = Reduction("products", "T dp, T p", "T mean", "dp * p", "a + b", "mean = a")
_scores_backward = Elementwise(
    "scores_backward", "T p, T mean, T scale", "T dp", "dp = (dp - mean) * p * scale"
)


def causal_softmax(scores: Array, first: int) -> Array:
    """Overwrite S[..., n, s] with its softmax over the keys s that query n sees; return log Z.

    The query in row i is at position `first` + i. log Z[..., n, 1]. On a GPU 3 launches.
    """
    causal_mask(scores, first)
    if on_gpu(scores):
        peak, total, log_z = _softmax_sums(scores)
        _softmax(peak, total, scores)
        return log_z
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    z = sum_columns(np.exp(scores, out=scores))
    scores /= z
    return largest + np.log(z, out=z)


def padded_softmax(scores: Array, held: Array) -> None:
    """Overwrite S[B, H, n, s] with its softmax over the keys that are held[B, s], 0 if none is."""
    xp = array_module(scores)
    hidden = ~held[:, None, None, :]
    scores += xp.where(hidden, -math.inf, 0.0).astype(scores.dtype)
    largest = scores.max(axis=-1, keepdims=True)
    scores -= xp.where(xp.isinf(largest), 0.0, largest).astype(scores.dtype)
    xp.exp(scores, out=scores)
    z = sum_columns(scores)
    z += z == 0  # no key is held; to assign to z[z == 0] would wait for a GPU
    scores /= z


def causal_mask(scores: Array, first: int) -> None:
    """Set the scores of keys later than their query to -inf; the query in row i is at `first` + i.

    These scores are a triangle, whose right side is the last column. Nothing else is touched.
    """
    if on_gpu(scores):
        _causal_mask(*scores.shape[-2:], first, -math.inf, scores)
        return
    n = scores.shape[-1] - first
    square = scores[..., :n, first:]
    square += np.triu(np.full((n, n), -np.inf, scores.dtype), 1)  # a query sees its own position


def recompute_probabilities(scores: Array, log_z: Array, first: int = 0) -> None:
    """Overwrite S[..., n, s] with P = exp(S - log Z), 0 for the keys that query n does not see.

    The query in row i is at position `first` + i.
    """
    if on_gpu(scores):
        _recompute_probabilities(log_z, *scores.shape[-2:], first, scores)
        return
    causal_mask(scores, first)
    scores -= log_z
    np.exp(scores, out=scores)


def scores_backward(dp: Array, p: Array, mean: Array | None = None, scale: float = 1.0) -> None:
    """Overwrite dP[..., n, s] with dS = scale P (dP - mean), the adjoint of a softmax.

    mean[..., n, 1]  by default <dP, P>, the sum of dP P over a row
    """
    if on_gpu(dp):
        p = widen(p)
        _scores_backward(p, _products(dp, p) if mean is None else mean, scale, dp)
        return
    dp -= sum_columns(dp, p) if mean is None else mean
    dp *= p
    if scale != 1:
        dp *= scale


# A target of -1 does not count (losses.IGNORED).
_row_losses = Elementwise(
    "row_losses",
    "raw T logits, T peak, T total, I target, int64 columns, T size, T outside",
    "T loss",
    """
    long long at = target;
    bool inside = at >= 0 && at < columns, counts = at != -1;
    T picked = inside ? logits[i * columns + at] : outside;
    loss = counts ? (log(total) - (picked - peak)) / size : T(0)""",
)
_cross_entropy_backward = Elementwise(
    "cross_entropy_backward",
    "T logit, T peak, T total, I target, T grad, int64 columns, T size, T outside",
    "T dx",
    """
    long long at = target;
    bool inside = at >= 0 && at < columns, counts = at != -1;
    T expected = inside ? T(i % columns == at) : outside;
    dx = counts ? (exp(logit - peak) / total - expected) * (grad / size) : T(0)""",
)


def cross_entropy(logits: Array, targets: Array, size: float | Array) -> tuple[Array, tuple]:
    """Return the loss of `losses.CrossEntropy` of rows on a GPU, and what backward needs.

    A target of -1 counts for nothing. Another one outside [0, C) makes the loss nan, because a
    check would wait for the GPU.
    """
    if not isinstance(size, float) and on_gpu(size):
        size = size.astype(logits.dtype)
    peak, total, _ = _softmax_sums(logits)
    rows = logits, peak.reshape(-1), total.reshape(-1), targets
    loss = _row_losses(*rows, logits.shape[-1], size, math.nan).sum()
    return loss, (logits, peak, total, targets[:, None], size)


def cross_entropy_backward(grad: Array, saved: tuple) -> Array:
    """Return dX[N, C] of `losses.CrossEntropy` on a GPU, from what `cross_entropy` has saved."""
    *rows, size = saved
    return _cross_entropy_backward(*rows, grad, rows[0].shape[-1], size, math.nan)
