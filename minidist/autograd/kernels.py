"""Functions with two texts: NumPy for arrays on the host, C for arrays on a GPU, in few launches.

The NumPy text is the definition. The C text computes the same in another order: a GPU sums in a
tree and rounds a b + c once. Both take float32 or float64 (`T` in C); half precision is widened
before. CuPy compiles a C text at its first call and keeps it. Letters: N rows, C columns.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minidist.backend import (
    Array,
    array_module,
    beside,
    device_module,
    erf,
    matmul,
    on_gpu,
    sum_over,
    widen,
)
from minidist.rng import Randomness


@dataclass(frozen=True)
class Elementwise:
    """A C text that runs once per element of its arrays, broadcast together; one launch.

    inputs, outputs  parameters in the order of the call, "T x, raw int64 order": an array or a
                     number, `raw` if the text indexes it. Outputs that are not passed are new
    text             statements; `i` is the element's index in row-major order

    CuPy documentation, User-Defined Kernels.
    """

    name: str
    inputs: str
    outputs: str
    text: str

    @functools.cached_property
    def kernel(self):
        xp = device_module("gpu")
        return xp.ElementwiseKernel(self.inputs, self.outputs, self.text, self.name)

    def __call__(self, *arrays, **size):
        return self.kernel(*arrays, **size)


@dataclass(frozen=True)
class Reduction:
    """A C text that reduces the first of its arrays along an axis; one launch.

    each      expression, of type `kind`: what one element contributes
    combine   expression: two such values, a and b, as one
    finish    expression that assigns the outputs from the total, a
    identity  expression: the value of no elements
    axis      -1, kept with length 1; 0; or None for all elements
    """

    name: str
    inputs: str
    outputs: str
    each: str
    combine: str
    finish: str
    identity: str = "0"
    kind: str = "T"
    preamble: str = ""
    axis: int | None = -1

    @functools.cached_property
    def kernel(self):
        texts = self.each, self.combine, self.finish, self.identity, self.name, self.kind
        more = {"preamble": self.preamble}
        return device_module("gpu").ReductionKernel(self.inputs, self.outputs, *texts, **more)

    def __call__(self, x: Array, *others, out: Array | None = None):
        outputs = self.outputs.count(",") + 1
        where = {"axis": self.axis, "keepdims": self.axis == -1}
        if outputs == 1:
            return self.kernel(x, *others, out=out, **where)
        made = [array_module(x).empty((*x.shape[:-1], 1), x.dtype) for _ in range(outputs)]
        self.kernel(x, *others, *made, **where)
        return made


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """Sum X[N, C] over its rows; on the host as the product of a vector of ones with it.

    On a CPU, BLAS is several times faster than a reduction along short rows.
    """
    if on_gpu(x):
        return sum_over(x, axis=0, out=out)
    return matmul(np.ones(len(x), x.dtype), x, out=out)


def sum_columns(x: Array) -> Array:
    """Sum X[..., C] over its last axis, kept with length 1; on the host as a product with ones."""
    if on_gpu(x):
        return sum_over(x, axis=-1, keepdims=True)
    return (x.reshape(-1, x.shape[-1]) @ np.ones((x.shape[-1], 1), x.dtype)).reshape(
        *x.shape[:-1], 1
    )


def mean_columns(x: Array) -> Array:
    return sum_columns(x) / x.shape[-1]


# A row's maximum and the sum of exp(x - maximum), in one pass (Milakov and Gimelshein 2018, section
# 3), and the logarithm of the sum of exp(x).
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
_hide_later = Elementwise(
    "hide_later",
    "int64 queries, int64 keys, int64 first, T hidden",
    "T x",
    "if (i % keys > first + i / keys % queries) x = hidden",
)
_probabilities_again = Elementwise(
    "probabilities_again",
    "T log_z, int64 queries, int64 keys",
    "T x",
    "x = i % keys > i / keys % queries ? T(0) : exp(x - log_z)",
)
_products = Reduction("products", "T dp, T p", "T mean", "dp * p", "a + b", "mean = a")
_scores_backward = Elementwise(
    "scores_backward", "T p, T mean, T scale", "T dp", "dp = (dp - mean) * p * scale"
)


def softmax_of_seen(scores: Array, first: int) -> Array:
    """Overwrite S[..., n, s] with its softmax over the keys that are seen; return log Z[..., n, 1].

    Query i is at position `first` + i. 3 launches.
    """
    hide_later(scores, first)
    if on_gpu(scores):
        peak, total, log_z = _softmax_sums(scores)
        _softmax(peak, total, scores)
        return log_z
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    z = sum_columns(np.exp(scores, out=scores))
    scores /= z
    return largest + np.log(z, out=z)


def hide_later(scores: Array, first: int) -> None:
    """Set the scores of keys later than their query to -inf; query i is at `first` + i.

    They are a triangle that ends with the last column; on the host nothing else is touched.
    """
    if on_gpu(scores):
        _hide_later(*scores.shape[-2:], first, -math.inf, scores)
        return
    n = scores.shape[-1] - first
    square = scores[..., :n, first:]
    square += np.triu(np.full((n, n), -np.inf, scores.dtype), 1)  # a query sees its own position


def probabilities_again(scores: Array, log_z: Array) -> None:
    """Overwrite S[..., n, s] with exp(S - log Z) over the keys that are seen; query i is at i."""
    if on_gpu(scores):
        _probabilities_again(log_z, *scores.shape[-2:], scores)
        return
    hide_later(scores, 0)
    scores -= log_z
    np.exp(scores, out=scores)


def scores_backward(dp: Array, p: Array, mean: Array | None = None, scale: float = 1.0) -> None:
    """Overwrite dP[..., n, s] with dS = scale P (dP - mean); by default mean is <dP, P>, by row."""
    if on_gpu(dp):
        p = widen(p)
        _scores_backward(p, _products(dp, p) if mean is None else mean, scale, dp)
        return
    dp -= sum_columns(dp * p) if mean is None else mean
    dp *= p
    if scale != 1:
        dp *= scale


_relu_backward = Elementwise("relu_backward", "T grad, T y", "T dx", "dx = grad * T(y > 0)")


def relu(x: Array) -> Array:
    xp = array_module(x)
    # On the host a row of zeros, because a scalar defeats SIMD.
    return xp.maximum(x, 0 if on_gpu(x) else np.zeros(x.shape[-1:], x.dtype))


def relu_backward(grad: Array, y: Array) -> Array:
    """dX = dY where Y > 0."""
    return _relu_backward(grad, y) if on_gpu(grad) else grad * (y > 0)


GELU_K, GELU_A = math.sqrt(2 / math.pi), 0.044715
_gelu = Elementwise(
    "gelu",
    "T x",
    "T y, T t",
    f"""
    t = tanh(x * (T({GELU_K}) + T({GELU_K * GELU_A}) * x * x));
    y = T(0.5) * x * (1 + t)""",
)
_gelu_backward = Elementwise(
    "gelu_backward",
    "T grad, T x, T t",
    "T dx",
    f"""
    T inner = (T({GELU_K}) + T({3 * GELU_K * GELU_A}) * x * x) * x * (1 - t * t);
    dx = T(0.5) * grad * (1 + t + inner)""",
)


def gelu(x: Array) -> tuple[Array, Array]:
    """Return Y = X/2 (1 + t), t = tanh(k (X + a X^3)), and t."""
    if on_gpu(x):
        return _gelu(x)
    t = np.asarray(x * x)
    t *= GELU_K * GELU_A
    t += GELU_K
    t *= x
    np.tanh(t, out=t)
    y = t + 1
    y *= x
    y *= 0.5
    return y, t


def gelu_backward(grad: Array, x: Array, t: Array) -> Array:
    """dX = dY ((1 - t^2) X/2 (k + 3 k a X^2) + (1 + t)/2), with few passes over memory."""
    if on_gpu(x):
        return _gelu_backward(grad, x, t)
    dx = x * x
    dx *= 3 * GELU_K * GELU_A
    dx += GELU_K
    dx *= x
    slope = np.asarray(t * t)
    np.subtract(1, slope, out=slope)
    dx *= slope
    dx += t
    dx += 1
    dx *= grad
    dx *= 0.5
    return dx


_gelu_erf = Elementwise(
    "gelu_erf",
    "T x",
    "T y, T cdf",
    f"""
    cdf = T(0.5) * (1 + erf(x * T({math.sqrt(0.5)})));
    y = x * cdf""",
)
_gelu_erf_backward = Elementwise(
    "gelu_erf_backward",
    "T grad, T x, T cdf",
    "T dx",
    f"dx = grad * (cdf + x * exp(T(-0.5) * x * x) * T({1 / math.sqrt(2 * math.pi)}))",
)


def gelu_erf(x: Array) -> tuple[Array, Array]:
    """Return Y = X Phi(X), Phi(X) = (1 + erf(X / sqrt 2)) / 2, and Phi(X)."""
    if on_gpu(x):
        return _gelu_erf(widen(x))
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    return x * cdf, cdf


def gelu_erf_backward(grad: Array, x: Array, cdf: Array) -> Array:
    """dX = dY (Phi(X) + X phi(X)), phi the density of the normal distribution."""
    if on_gpu(x):
        return _gelu_erf_backward(widen(grad), x, cdf)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * density)


# The mean and the sum of squares around it, of parts (Chan, Golub, LeVeque 1983, equation 2.1).
_moments = Reduction(
    "moments",
    "T x, T eps",
    "T mean, T r",
    each="Moments{1, x, 0}",
    combine="merge(a, b)",
    finish="mean = a.mean, r = 1 / sqrt(a.squares / a.count + eps)",
    identity="Moments{0, 0, 0}",
    kind="Moments",
    preamble="""
struct Moments { T count, mean, squares; };
__device__ Moments merge(Moments x, Moments y) {
    T count = x.count + y.count, d = y.mean - x.mean;
    T share = count > 0 ? y.count / count : T(0);
    return Moments{count, x.mean + d * share, x.squares + y.squares + d * d * x.count * share};
}""",
)
_normalize = Elementwise(
    "normalize",
    "T x, T mean, T r, T gain, T bias",
    "T y, T n",
    "n = (x - mean) * r; y = n * gain + bias",
)
_norm_means = Reduction(
    "norm_means",
    "T grad, T gain, T n, T columns",
    "T mean, T along",
    each="Pair{grad * gain, grad * gain * n}",
    combine="add(a, b)",
    finish="mean = a.first / columns, along = a.second / columns",
    identity="Pair{0, 0}",
    kind="Pair",
    preamble="""
struct Pair { T first, second; };
__device__ Pair add(Pair x, Pair y) {
    return Pair{x.first + y.first, x.second + y.second};
}""",
)
_norm_backward = Elementwise(
    "norm_backward",
    "T grad, T gain, T n, T r, T mean, T along",
    "T dx",
    "dx = r * (grad * gain - mean - n * along)",
)
_sum_rows_of_product = Reduction(
    "sum_rows_of_product", "T x, T y", "T total", "x * y", "a + b", "total = a", axis=0
)


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return Y = n gain + bias, n = (X - mean) r and r = 1 / sqrt(var + eps). 2 launches."""
    if on_gpu(x):
        mean, r = _moments(x, eps)
        return *_normalize(x, mean, r, gain, bias), r
    n = x - mean_columns(x)
    r = 1 / np.sqrt(mean_columns(n * n) + eps)
    n *= r
    y = n * gain
    y += bias
    return y, n, r


def layer_norm_backward(grad: Array, gain: Array, n: Array, r: Array) -> Array:
    """dX = r (d - mean d - n mean(d n)), d = dY gain. 2 launches."""
    if on_gpu(grad):
        return _norm_backward(grad, gain, n, r, *_norm_means(grad, gain, n, n.shape[-1]))
    d = grad * gain
    dx = n * mean_columns(d * n)
    d -= mean_columns(d)
    d -= dx
    d *= r
    return d


def sum_rows_of_product(x: Array, y: Array, out: Array | None = None) -> Array:
    """Sum X Y over all axes but the last."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return _sum_rows_of_product(x, y, out=out) if on_gpu(x) else sum_rows(x * y, out=out)


_row_losses = Elementwise(
    "row_losses",
    "raw T logits, T peak, T total, I target, int64 columns, T size, T outside",
    "T loss",
    """
    long long at = target;
    bool inside = at >= 0 && at < columns;
    T picked = inside ? logits[i * columns + at] : outside;
    loss = (log(total) - (picked - peak)) / size""",
)
_cross_entropy_backward = Elementwise(
    "cross_entropy_backward",
    "T logit, T peak, T total, I target, T grad, int64 columns, T size, T outside",
    "T dx",
    """
    long long at = target;
    bool inside = at >= 0 && at < columns;
    T expected = inside ? T(i % columns == at) : outside;
    dx = (exp(logit - peak) / total - expected) * (grad / size)""",
)


def cross_entropy(logits: Array, targets: Array, size: float) -> tuple[Array, tuple]:
    """Return the sum of -log softmax(X[N, C])[target] / size, and what backward needs.

    On a GPU a target outside [0, C) makes the loss nan: to look at it would wait for the device.
    """
    if on_gpu(logits):
        peak, total, _ = _softmax_sums(logits)
        rows = logits, peak.reshape(-1), total.reshape(-1), targets
        loss = _row_losses(*rows, logits.shape[-1], size, math.nan).sum()
        return loss, (logits, peak, total)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    picked = shifted[np.arange(len(logits)), targets]
    probabilities = np.exp(shifted, out=shifted)
    sums = sum_columns(probabilities)
    probabilities /= sums
    return (np.log(sums[:, 0]) - picked).sum() / size, (probabilities,)


def cross_entropy_backward(grad: Array, targets: Array, size: float, saved: tuple) -> Array:
    """dX = (softmax(X) - onehot) dL / size; the host's probabilities are overwritten."""
    if on_gpu(grad):
        columns = saved[0].shape[-1]
        return _cross_entropy_backward(*saved, targets[:, None], grad, columns, size, math.nan)
    (dx,) = saved
    dx[np.arange(len(dx)), targets] -= 1
    dx *= grad / size
    return dx


# rng.hash_uniform(key, counter) >= rate in integers: threshold = rate 2^53.
_dropout = Elementwise(
    "dropout",
    "T x, raw int64 examples, uint64 key, uint64 threshold, uint64 first, uint64 whole, "
    "int64 part, T factor",
    "T y",
    """
    unsigned long long z = examples[i / part] * whole + first + i % part;
    z = z * 0x9E3779B97F4A7C15ULL + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z = (z ^ (z >> 31)) >> 11;
    y = x * T(z >= threshold) * factor""",
)


def dropout(
    x: Array, rate: float, name: str, randomness: Randomness, window=None, full_shape=None
) -> Callable[[Array], Array]:
    """Return the function X -> X keep / (1 - rate) for arrays like X[B, ...]; it is its adjoint.

    The mask is that of `Randomness.keep`. On a GPU it is hashed again where it is used: there is
    no mask in memory, and the indices of the examples are all that travels, once.
    """
    factor = 1 / (1 - float(rate))
    if not on_gpu(x):
        keep = randomness.keep(name, rate, x.shape, window, full_shape)
        return lambda x: x * keep * factor
    full_shape, part = randomness.full_shape(x.shape, full_shape), math.prod(x.shape[1:])
    numbers = randomness.key(name), math.ceil(rate * 2**53), first_of(full_shape, window, part)
    settings = (
        examples_beside(randomness, x),
        *map(np.uint64, (*numbers, math.prod(full_shape))),
        part,
        float(x.dtype.type(factor)),
    )
    return lambda x: _dropout(widen(x), *settings).astype(x.dtype, copy=False)


def examples_beside(randomness: Randomness, x: Array) -> Array:
    """Return the indices of the examples on the GPU of x; only the first call copies them."""
    device = x.device.id
    if device not in randomness.copies:
        randomness.copies[device] = beside(np.asarray(randomness.examples, np.int64), x)
    return randomness.copies[device]


def first_of(full_shape: tuple[int, ...], window, part: int) -> int:
    """Return where a window of `part` consecutive elements begins in an array of this shape."""
    first = last = 0
    for side, cut in zip(full_shape, window or [slice(None)] * len(full_shape), strict=True):
        begin, end, _ = cut.indices(side)
        first, last = first * side + begin, last * side + max(begin, end - 1)
    if part and last - first + 1 != part:
        raise ValueError(
            f"a window of dropout on a GPU has consecutive elements of each example "
            f"{list(full_shape)}; cut its first axis alone"
        )
    return first


_rows_of = Elementwise(
    "rows_of",
    "raw T table, raw I indices, int64 rows, int64 columns, float32 outside",
    "T y",
    """
    long long row = indices[i / columns];
    if (row >= 0 && row < rows) y = table[row * columns + i % columns];
    else y = outside""",
)
_run_starts = Elementwise(
    "run_starts",
    "raw I indices, raw int64 order, int64 count",
    "int64 start",
    """
    long long low = 0, high = count;
    while (low < high) {
        long long middle = (low + high) / 2, index = indices[order[middle]];
        if (index < i) low = middle + 1;
        else high = middle;
    }
    start = low""",
)
# NumPy's reduceat: the first element of a run plus the pairwise sum of the others, which is cut in
# halves, multiples of 8, down to 128 and there sums 8 interleaved parts. `stack` has the sums of
# the left halves that still wait for their right ones.
_sum_runs = Elementwise(
    "sum_runs",
    "raw S grad, raw int64 order, raw int64 starts, int64 columns",
    "T sum",
    """
    long long run = i / columns, column = i % columns;
    long long begin = starts[run], others = starts[run + 1] - begin - 1;
    S stack[32];
    int depth = 0;
    for (long long at = 0; at < others; ) {
        long long low = 0, size = others, k;
        int rights = 0;
        while (size > 128) {
            long long half = size / 2 - size / 2 % 8;
            bool left = at < low + half;
            low = left ? low : low + half;
            size = left ? half : size - half;
            rights = left ? 0 : rights + 1;
        }
        at += size;
        low += begin + 1;
        long long even = low + size - size % 8, stop = low + size;
        S leaf = grad[order[low] * columns + column];
        if (size >= 8) {
            S lane[8];
            for (k = 0; k < 8; k++) lane[k] = grad[order[low + k] * columns + column];
            for (k = low + 8; k < even; k++) {
                lane[(k - low) % 8] += grad[order[k] * columns + column];
            }
            leaf = ((lane[0] + lane[1]) + (lane[2] + lane[3]))
                + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
            low = even - 1;
        }
        for (k = low + 1; k < stop; k++) leaf += grad[order[k] * columns + column];
        for (; rights > 0; rights--) leaf = stack[--depth] + leaf;
        stack[depth++] = leaf;
    }
    S total = others < 0 ? S(0) : S(grad[order[begin] * columns + column]);
    sum = others > 0 ? total + stack[0] : total""",
)


def rows_of(table: Array, indices: Array) -> Array:
    """Return W[indices[...]] of W[V, C]; on a GPU an index outside [0, V) makes a row of nan."""
    if not on_gpu(table):
        return table[indices]
    y = array_module(table).empty((*indices.shape, table.shape[1]), table.dtype)
    return _rows_of(table, indices, *table.shape, math.nan, y)


def sum_into_rows(grad: Array, indices: Array, out: Array) -> Array:
    """out[V, C] = for each row v, the sum of dY[N, C] where indices[N] = v, in their order.

    The sum sorts the places by index and adds up each run. The order is the same every time, and
    on a GPU as on the host, and so are the bits; float16 is summed in float32 and rounded once.
    """
    if on_gpu(grad):
        order = indices.argsort()  # on a GPU it is stable: CuPy has no other
        starts = _run_starts(indices, order, indices.size, size=len(out) + 1)
        return _sum_runs(widen(grad), order, starts, out.shape[1], out)
    out.fill(0)
    if indices.size:
        order = np.argsort(indices, kind="stable")
        rows, starts = np.unique(indices[order], return_index=True)
        out[rows] = np.add.reduceat(grad[order], starts, axis=0)
    return out
