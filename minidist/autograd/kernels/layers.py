"""The kernels of layers: activations, dropout, embeddings, layer norm; each beside its adjoint.

A C text is beside its NumPy text; layer norm's NumPy text is functions.LayerNorm.
"""

import math
from collections.abc import Callable

import numpy as np

from minidist.autograd.kernels.launch import Elementwise, Reduction
from minidist.backend import Array, array_module, erf, on_device_of, on_gpu, widen
from minidist.errors import WrongInput
from minidist.pieces import Positions
from minidist.rng import Randomness

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
    "T y, T s",
    f"""
    s = 1 / (1 + exp(x * (T({-2 * GELU_K}) - T({2 * GELU_K * GELU_A}) * x * x)));
    y = x * s""",
)
_gelu_backward = Elementwise(
    "gelu_backward",
    "T grad, T x, T s",
    "T dx",
    f"""
    T slope = (T({2 * GELU_K}) + T({6 * GELU_K * GELU_A}) * x * x) * (1 - s);
    dx = grad * s * (1 + x * slope)""",
)


def gelu(x: Array) -> tuple[Array, Array]:
    """Return Y = X s and s = (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), u = k (X + a X^3).

    exp takes half as long as tanh, and does not cancel where s is small.
    """
    if on_gpu(x):
        return _gelu(x)
    s = np.asarray(x * x)
    s *= -2 * GELU_K * GELU_A
    s -= 2 * GELU_K
    s *= x
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is the right s
        np.exp(s, out=s)
    s += 1
    np.reciprocal(s, out=s)
    return x * s, s


def gelu_backward(grad: Array, x: Array, s: Array) -> Array:
    """dX = dY (s + X s (1 - s) (2 k + 6 k a X^2)), with few passes over memory."""
    if on_gpu(x):
        return _gelu_backward(grad, x, s)
    dx = x * x
    dx *= 6 * GELU_K * GELU_A
    dx += 2 * GELU_K
    dx *= x
    dx *= 1 - s
    dx += 1
    dx *= s
    dx *= grad
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
        return _gelu_erf(x)
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    return x * cdf, cdf


def gelu_erf_backward(grad: Array, x: Array, cdf: Array) -> Array:
    """dX = dY (Phi(X) + X phi(X)), phi the density of the normal distribution."""
    if on_gpu(x):
        return _gelu_erf_backward(widen(grad), x, cdf)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * density)


# rng.hash_uniform(key, counter) >= rate in integers: threshold = rate 2^53.
_dropout = Elementwise(
    "dropout",
    "T x, raw int64 examples, uint64 key, uint64 threshold, uint64 first, uint64 whole, "
    "int64 part, int64 head, int64 jump, T factor",
    "T y",
    """
    long long at = i % part;
    at += at < head ? 0 : jump;
    unsigned long long z = examples[i / part] * whole + first + at;
    z = z * 0x9E3779B97F4A7C15ULL + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z = (z ^ (z >> 31)) >> 11;
    y = x * T(z >= threshold) * factor""",
)


def dropout(
    x: Array, rate: float, name: str, randomness: Randomness, window=None, full_shape=None
) -> Callable[[Array], Array]:
    """Return the function X -> X keep / (1 - rate) of arrays X[B, ...]; it is its own adjoint.

    The mask and the arguments after x are as in `Randomness.keep`. On a GPU the mask is hashed
    in each call, and is never in memory; the host sends only the indices of the examples, once.

    ValueError, on a GPU, for a window whose elements are not consecutive, and for positions of more
    than two runs.
    """
    factor = 1 / (1 - float(rate))
    if not on_gpu(x):
        keep = randomness.keep(name, rate, x.shape, window, full_shape)
        return lambda x: (widen(x) * keep * x.dtype.type(factor)).astype(x.dtype, copy=False)
    held = randomness.held(window, full_shape)
    full_shape, part = randomness.full_shape(x.shape, full_shape), math.prod(x.shape[1:])
    if held is None:
        first, head, jump = first_of(full_shape, window, part), part, 0
    else:
        first, head, jump = runs_of(held, math.prod(full_shape[1:]))
    numbers = randomness.key(name), math.ceil(rate * 2**53), first, math.prod(full_shape)
    settings = (
        examples_beside(randomness, x),
        *map(np.uint64, numbers),
        part,
        head,
        jump,
        float(x.dtype.type(factor)),
    )
    return lambda x: _dropout(widen(x), *settings).astype(x.dtype, copy=False)


def examples_beside(randomness: Randomness, x: Array) -> Array:
    """Return the indices of the examples on the GPU of x; only the first call copies them."""
    device = x.device.id
    if device not in randomness.copies:
        randomness.copies[device] = on_device_of(np.asarray(randomness.examples, np.int64), x)
    return randomness.copies[device]


def runs_of(positions: Positions, row: int) -> tuple[int, int, int]:
    """Return the start of two runs of rows of `row` elements, the length of the first, the gap."""
    if len(positions.runs) > 2:
        raise WrongInput(
            f"dropout on a GPU takes positions in two runs at most, not {len(positions.runs)}"
        )
    (a, b), (c, _) = (*positions.runs, (0, 0), (0, 0))[:2]
    return a * row, (b - a) * row, (c - b) * row


def first_of(full_shape: tuple[int, ...], window, part: int) -> int:
    """Return the start of a window of `part` consecutive elements in an array of this shape.

    ValueError if they are not consecutive.
    """
    first = last = 0
    for side, cut in zip(full_shape, window or [slice(None)] * len(full_shape), strict=True):
        begin, end, _ = cut.indices(side)
        first, last = first * side + begin, last * side + max(begin, end - 1)
    if part and last - first + 1 != part:
        raise WrongInput(
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
_sum_runs = Elementwise(
    "sum_runs",
    "raw T grad, raw int64 order, raw int64 starts, int64 columns",
    "T sum",
    """
    long long run = i / columns, column = i % columns;
    double total = 0;
    for (long long k = starts[run]; k < starts[run + 1]; k++) {
        total += double(grad[order[k] * columns + column]);
    }
    sum = T(total)""",
)


def rows_of(table: Array, indices: Array) -> Array:
    """Return W[indices[...]] of W[V, C]; on a GPU an index outside [0, V) makes a row of nan."""
    if not on_gpu(table):
        return table[indices]
    y = array_module(table).empty((*indices.shape, table.shape[1]), table.dtype)
    return _rows_of(table, indices.reshape(-1), *table.shape, math.nan, y)


def sum_into_rows(grad: Array, indices: Array, out: Array) -> Array:
    """out[V, C] = for each row v, the sum of dY[N, C] where indices[N] = v, in their order.

    The places are sorted by index, and each run of equal indices is added up in one fixed order:
    every call gives the same bits. A GPU adds one element after the other in float64, and rounds
    once. The host adds pairwise, in float32 for float16; so its last bits differ from the GPU's.
    """
    if on_gpu(grad):
        order = indices.argsort()  # on a GPU it is stable: CuPy has no other
        starts = _run_starts(indices, order, indices.size, size=len(out) + 1)
        return _sum_runs(grad, order, starts, out.shape[1], out)
    out.fill(0)
    if indices.size:
        order = np.argsort(indices, kind="stable")
        rows, starts = np.unique(indices[order], return_index=True)
        out[rows] = np.add.reduceat(widen(grad[order]), starts, axis=0)
    return out


# The mean, and the sum of squared differences from it. `merge` has the formula for two parts of a
# sample (Chan, Golub, LeVeque 1979, "Updating formulae ... for computing sample variances").
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


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return Y, n and r of `functions.LayerNorm` on a GPU. 2 launches."""
    x = widen(x)
    mean, r = _moments(x, eps)
    return *_normalize(x, mean, r, widen(gain), widen(bias)), r


def layer_norm_backward(grad: Array, gain: Array, n: Array, r: Array) -> Array:
    """Return dX of `functions.LayerNorm` on a GPU. 2 launches."""
    grad, gain = widen(grad), widen(gain)
    return _norm_backward(grad, gain, n, r, *_norm_means(grad, gain, n, n.shape[-1]))
