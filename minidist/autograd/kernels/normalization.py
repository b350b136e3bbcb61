"""Layer normalisation on a GPU; its NumPy text is functions.LayerNorm."""

from minidist.autograd.kernels.launch import Elementwise, Reduction
from minidist.backend import Array, widen

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
