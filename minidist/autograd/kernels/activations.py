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
