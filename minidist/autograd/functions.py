"""The functions that neural networks are made of, each forward beside its adjoint.

Letters: B batch, C width, V vocabulary. Attention and the losses have files of their own. A thunk
in a result is a parameter's gradient that may be computed later (see `tensor.Function`). Row sums
are products with a vector of ones: on a CPU, BLAS does them several times faster than a reduction
along short rows.
"""

import math
from collections.abc import Sequence

import numpy as np

from minidist.autograd.deferred import Product
from minidist.autograd.operators import Concatenate
from minidist.autograd.tensor import Function, Gradient, Tensor
from minidist.backend import (
    Array,
    array_module,
    as_array,
    beside,
    erf,
    into,
    matmul,
    to_host,
    widen,
)
from minidist.rng import Randomness


class Linear(Function):
    """Y = X W + b  =>  dX = dY W^T, dW = X^T dY, db = sum of dY over rows.

    X[..., C_in], W[C_in, C_out].
    With `transposed`, W is stored as [C_out, C_in]: a head that shares the weight of an embedding.
    """

    def __init__(self, transposed: bool = False):
        self.transposed = transposed

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        w = w.T if self.transposed else w
        if x.shape[-1] != w.shape[0]:
            raise ValueError(
                f"linear: input {list(x.shape)} needs {w.shape[0]} columns, the rows of its weight"
            )
        self.x, self.w = x.reshape(-1, w.shape[0]), w
        y = matmul(self.x, w)
        if b is not None:
            y += b
        return y.reshape(*x.shape[:-1], w.shape[1])

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        x, w = self.x, self.w
        rows = grad.reshape(-1, w.shape[1])
        input_shape = (*grad.shape[:-1], w.shape[0])
        dx = None if self.inputs[0] is None else matmul(rows, w.T).reshape(input_shape)
        dw = Product(rows, x) if self.transposed else Product(x, rows)

        def db(out=None):
            return sum_rows(rows, out=out)

        return (dx, dw, db)[: len(self.inputs)]


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """Sum X[N, C] over its rows, as the product of a vector of ones with it."""
    return matmul(array_module(x).ones(len(x), x.dtype), x, out=out)


def sum_columns(x: Array) -> Array:
    """Sum X[..., C] over its last axis, kept with length 1, as a product with a vector of ones."""
    ones = array_module(x).ones((x.shape[-1], 1), x.dtype)
    return (x.reshape(-1, x.shape[-1]) @ ones).reshape(*x.shape[:-1], 1)


def mean_columns(x: Array) -> Array:
    return sum_columns(x) / x.shape[-1]


class Relu(Function):
    """Y = max(X, 0)  =>  dX = dY where Y > 0."""

    def forward(self, x: Array) -> Array:
        xp = array_module(x)
        # A row of zeros, because a scalar defeats SIMD.
        self.y = xp.maximum(x, xp.zeros(x.shape[-1:], x.dtype))
        return self.y

    def backward(self, grad: Array) -> Array:
        return grad * (self.y > 0)


class GeluTanh(Function):
    """Y = X/2 (1 + tanh(k (X + a X^3))), k = sqrt(2/pi), a = 0.044715.

    Hendrycks and Gimpel 2016, section 2: the approximation.
    """

    k, a = math.sqrt(2 / math.pi), 0.044715

    def forward(self, x: Array) -> Array:
        k, a, dtype, x = self.k, self.a, x.dtype, widen(x)  # in half precision x^3 overflows at 41
        t = as_array(x * x)
        t *= k * a
        t += k
        t *= x
        array_module(x).tanh(t, out=t)
        self.x, self.t = x, t
        y = t + 1
        y *= x
        y *= 0.5
        return y.astype(dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        k, a, x, t = self.k, self.a, self.x, self.t
        inner = x * x  # (1 - t^2) x/2 (k + 3 k a x^2) + (1 + t)/2, with few passes over memory
        inner *= 3 * k * a
        inner += k
        inner *= x
        slope = as_array(t * t)
        array_module(t).subtract(1, slope, out=slope)
        inner *= slope
        inner += t
        inner += 1
        inner *= grad
        inner *= 0.5
        return inner.astype(grad.dtype, copy=False)


class GeluErf(Function):
    """Y = X Phi(X), Phi(X) = (1 + erf(X / sqrt 2)) / 2  =>  dX = dY (Phi(X) + X phi(X)).

    Hendrycks and Gimpel 2016, section 2; Phi is the normal distribution, phi its density.
    """

    def forward(self, x: Array) -> Array:
        self.x, self.cdf = x, 0.5 * (1 + erf(x * math.sqrt(0.5)))
        return x * self.cdf

    def backward(self, grad: Array) -> Array:
        x = widen(self.x)
        density = array_module(grad).exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return (grad * (self.cdf + x * density)).astype(grad.dtype, copy=False)


class Softmax(Function):
    """Y = exp(X - max X) / sum, per row  =>  dX = Y (dY - <dY, Y>).

    The maximum is the row's own, so no row underflows.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        wide = widen(x)
        y = array_module(x).exp(wide - wide.max(axis=self.axis, keepdims=True))
        y /= y.sum(axis=self.axis, keepdims=True)
        self.y = y.astype(x.dtype, copy=False)
        return self.y

    def backward(self, grad: Array) -> Array:
        y, wide = widen(self.y), widen(grad)
        dx = y * (wide - (wide * y).sum(axis=self.axis, keepdims=True))
        return dx.astype(grad.dtype, copy=False)


class LogSoftmax(Function):
    """Y = X - max X - log sum exp(X - max X), per row  =>  dX = dY - exp(Y) sum dY."""

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        xp, wide = array_module(x), widen(x)
        shifted = wide - wide.max(axis=self.axis, keepdims=True)
        self.y = shifted - xp.log(xp.exp(shifted).sum(axis=self.axis, keepdims=True))
        return self.y.astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        wide = widen(grad)
        dx = wide - array_module(grad).exp(self.y) * wide.sum(axis=self.axis, keepdims=True)
        return dx.astype(grad.dtype, copy=False)


class LayerNorm(Function):
    """Y = n g + b, n = (X - mean) r, r = 1 / sqrt(var + eps), over the last axis.

    Ba et al. 2016, equations 3 and 4.
    With d = dY g:  dX = r (d - mean d - n mean(d n)),  dg = sum dY n,  db = sum dY.
    """

    def __init__(self, eps: float = 1e-5):
        self.eps = eps

    def forward(self, x: Array, gain: Array, bias: Array) -> Array:
        wide = widen(x)
        n = wide - mean_columns(wide)
        r = 1 / array_module(x).sqrt(mean_columns(n * n) + self.eps)
        n *= r
        self.n, self.r, self.gain = n, r, gain
        y = n * gain
        y += bias
        return y.astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        n, r, gain = self.n, self.r, self.gain
        wide = widen(grad)
        width = n.shape[-1]

        def dgain(out=None):
            total = sum_rows((wide * n).reshape(-1, width))
            return into(out, total.astype(grad.dtype, copy=False))

        def dbias(out=None):
            return sum_rows(grad.reshape(-1, width), out=out)

        d = wide * gain
        dx = n * mean_columns(d * n)
        d -= mean_columns(d)
        d -= dx
        d *= r
        return d.astype(grad.dtype, copy=False), dgain, dbias


class Embedding(Function):
    """Y = W[indices]  =>  dW[v] = sum of dY over the places where indices = v.

    W[V, C], indices[...] of integers.
    The sum sorts the places by index and adds up each run. The order is the same every time, and so
    are the bits.
    """

    def __init__(self, indices: Array):
        self.indices = check_indices(indices, "token")

    def forward(self, w: Array) -> Array:
        if self.indices.size and self.indices.max() >= len(w):
            raise ValueError(f"token {self.indices.max()} is outside a vocabulary of {len(w)}")
        self.shape = w.shape
        return w[beside(self.indices, w)]

    def backward(self, grad: Array) -> Gradient:
        xp, shape, indices = array_module(grad), self.shape, self.indices.reshape(-1)

        def dw(out=None):
            out = xp.empty(shape, grad.dtype) if out is None else out
            out.fill(0)
            if indices.size:
                order = np.argsort(indices, kind="stable")  # all of it on the host
                rows, starts = np.unique(indices[order], return_index=True)
                ordered = grad.reshape(-1, shape[1])[beside(order, grad)]
                sums = xp.add.reduceat(ordered, beside(starts, grad), axis=0)
                out[beside(rows, grad)] = sums
            return out

        return dw


class Dropout(Function):
    """Y = X keep / (1 - rate)  =>  dX = dY keep / (1 - rate)  (Srivastava et al. 2014)."""

    def __init__(self, keep: Array, rate: float):
        self.keep, self.factor = keep, 1 / (1 - float(rate))

    def forward(self, x: Array) -> Array:
        self.keep = beside(self.keep, x)
        return x * self.keep * self.factor

    def backward(self, grad: Array) -> Array:
        return grad * self.keep * self.factor


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    return Concatenate(axis)(*tensors)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    return Linear(transposed)(x, weight) if bias is None else Linear(transposed)(x, weight, bias)


def relu(x: Tensor) -> Tensor:
    return Relu()(x)


def gelu(x: Tensor, form: str = "tanh") -> Tensor:
    """Gaussian error linear unit; form "tanh" (fast) or "erf" (exact)."""
    if form not in ("tanh", "erf"):
        raise ValueError(f"gelu form {form!r}: choose 'tanh' or 'erf'")
    return (GeluTanh if form == "tanh" else GeluErf)()(x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return Softmax(axis)(x)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return LogSoftmax(axis)(x)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return LayerNorm(eps)(x, gain, bias)


def embedding(indices: Array, weight: Tensor) -> Tensor:
    return Embedding(indices)(weight)


def dropout(
    x: Tensor,
    rate: float,
    name: str,
    randomness: Randomness,
    window: Sequence[slice] | None = None,
    full_shape: Sequence[int] | None = None,
) -> Tensor:
    """Drop elements of X[B, ...] and scale the rest by 1 / (1 - rate).

    If a rank holds a part of each example, it passes `window` and `full_shape`: see
    `Randomness.keep`.
    """
    keep = randomness.keep(name, rate, x.shape, window, full_shape)
    return Dropout(keep, rate)(x)


def check_indices(indices: Tensor | Array, what: str) -> np.ndarray:
    """Return integer indices on the host, none negative: a GPU would wrap them silently."""
    indices = to_host(indices.data if isinstance(indices, Tensor) else indices)
    if indices.dtype.kind not in "iu":
        raise ValueError(f"{what} indices must be integers, not {indices.dtype}")
    if indices.size and indices.min() < 0:
        raise ValueError(f"{what} index {indices.min()} is negative")
    return indices
