"""Activations, each forward beside its adjoint."""

import math

import numpy as np

from minidist.autograd.kernels.launch import Elementwise
from minidist.backend import Array, array_module, erf, on_gpu, widen

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
