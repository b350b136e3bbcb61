"""The functions that neural networks are made of, each forward beside its adjoint.

Letters: B batch, C width, V vocabulary. Attention and the losses have files of their own. A thunk
in a result is a parameter's gradient that may be computed later (see `tensor.Function`). kernels/
has what runs on a GPU.
"""

from collections.abc import Sequence
from functools import partial

from minidist.autograd.checks import check_axes, check_indices, check_rate
from minidist.autograd.deferred import Gradient, Product
from minidist.autograd.eight_bits import LinearInEightBits
from minidist.autograd.kernels import layers
from minidist.autograd.kernels.softmax import mean_columns, sum_rows, sum_rows_of_product
from minidist.autograd.operators import Concatenate
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, into, matmul, on_gpu, widen
from minidist.errors import WrongInput
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
        if x.shape[-1:] != w.shape[:1]:
            raise WrongInput(
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
        return (dx, dw, partial(sum_rows, rows))[: len(self.inputs)]  # the bias, if there is one


class Relu(Function):
    """Y = max(X, 0)  =>  dX = dY where Y > 0."""

    def forward(self, x: Array) -> Array:
        self.y = layers.relu(x)
        return self.y

    def backward(self, grad: Array) -> Array:
        return layers.relu_backward(grad, self.y)


class GeluTanh(Function):
    """Y = X s, s = (1 + tanh(k (X + a X^3))) / 2, k = sqrt(2/pi), a = 0.044715.

    Hendrycks and Gimpel 2016, section 2: the approximation.
    """

    def forward(self, x: Array) -> Array:
        self.x = widen(x)  # in half precision x^3 overflows at 41
        y, self.s = layers.gelu(self.x)
        return y.astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        dx = layers.gelu_backward(widen(grad), self.x, self.s)
        return dx.astype(grad.dtype, copy=False)


class GeluErf(Function):
    """Y = X Phi(X), Phi(X) = (1 + erf(X / sqrt 2)) / 2  =>  dX = dY (Phi(X) + X phi(X)).

    Hendrycks and Gimpel 2016, section 2; Phi is the normal distribution, phi its density.
    """

    def forward(self, x: Array) -> Array:
        self.x = x
        y, self.cdf = layers.gelu_erf(widen(x))
        return y.astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        dx = layers.gelu_erf_backward(grad, widen(self.x), self.cdf)
        return dx.astype(grad.dtype, copy=False)


class Softmax(Function):
    """Y = exp(X - max X) / sum, per row  =>  dX = Y (dY - <dY, Y>).

    The maximum is the row's own, so no row underflows.
    """

    def __init__(self, axis: int = -1):
        self.axis = axis

    def forward(self, x: Array) -> Array:
        check_axes(self.axis, x.shape)
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
        check_axes(self.axis, x.shape)
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
        self.gain = gain
        if on_gpu(x):
            self.gain = widen(gain)
            y, self.n, self.r = layers.layer_norm(x, self.gain, bias, self.eps)
            return y.astype(x.dtype, copy=False)
        wide = widen(x)
        n = wide - mean_columns(wide)
        r = 1 / array_module(x).sqrt(mean_columns(n, n) + self.eps)
        n *= r
        self.n, self.r = n, r
        y = n * gain
        y += bias
        return y.astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        n, r, gain = self.n, self.r, self.gain
        wide = widen(grad)

        def dgain(out=None):
            if wide is grad:
                return sum_rows_of_product(wide, n, out)
            return into(out, sum_rows_of_product(wide, n).astype(grad.dtype))

        def dbias(out=None):
            return sum_rows(grad.reshape(-1, n.shape[-1]), out=out)

        if on_gpu(grad):
            dx = layers.layer_norm_backward(wide, gain, n, r)
            return dx.astype(grad.dtype, copy=False), dgain, dbias
        d = wide * gain
        dx = n * mean_columns(d, n)
        d -= mean_columns(d)
        d -= dx
        d *= r
        return d.astype(grad.dtype, copy=False), dgain, dbias


class Embedding(Function):
    """Y = W[indices]  =>  dW[v] = sum of dY over the places where indices = v.

    W[V, C], indices[...] of integers.
    """

    def __init__(self, indices: Array):
        self.indices = indices

    def forward(self, w: Array) -> Array:
        self.indices = check_indices(self.indices, "token", len(w), w)
        self.shape = w.shape
        return layers.rows_of(w, self.indices)

    def backward(self, grad: Array) -> Gradient:
        shape, indices = self.shape, self.indices.reshape(-1)

        def dw(out=None):
            out = array_module(grad).empty(shape, grad.dtype) if out is None else out
            return layers.sum_into_rows(grad.reshape(-1, shape[1]), indices, out)

        return dw


class Dropout(Function):
    """Y = X keep / (1 - rate)  =>  dX = dY keep / (1 - rate)  (Srivastava et al. 2014)."""

    def __init__(self, rate: float, name: str, randomness: Randomness, *part):
        check_rate(rate)
        self.mask = rate, name, randomness, *part

    def forward(self, x: Array) -> Array:
        self.drop = layers.dropout(x, *self.mask)
        return self.drop(x)

    def backward(self, grad: Array) -> Array:
        return self.drop(grad)


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    return Concatenate(axis)(*tensors)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    bits = weight.format.product
    multiply = Linear(transposed) if bits is None else LinearInEightBits(bits, transposed)
    return multiply(x, weight) if bias is None else multiply(x, weight, bias)


def relu(x: Tensor) -> Tensor:
    return Relu()(x)


def gelu(x: Tensor, form: str = "tanh") -> Tensor:
    """Gaussian error linear unit; form "tanh" (fast) or "erf" (exact)."""
    if form not in ("tanh", "erf"):
        raise WrongInput(f"gelu form {form!r}: choose 'tanh' or 'erf'")
    return (GeluTanh if form == "tanh" else GeluErf)()(x)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(A) B of X = [A, B], whose last axis is twice as wide."""
    return SwiGLU()(x)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return Softmax(axis)(x)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return LogSoftmax(axis)(x)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return RMSNorm(eps)(x, gain)


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
    return Dropout(rate, name, randomness, window, full_shape)(x)


class RMSNorm(Function):
    """Y = n g, n = X r, r = 1 / sqrt(mean of X^2 + eps), over the last axis.

    Zhang and Sennrich 2019, equation 4: LayerNorm without the mean and without the bias.
    With d = dY g:  dX = r (d - n mean(d n)),  dg = sum dY n.
    """

    def __init__(self, eps: float = 1e-5):
        self.eps = eps

    def forward(self, x: Array, gain: Array) -> Array:
        wide = widen(x)
        self.gain, self.r = gain, 1 / array_module(x).sqrt(mean_columns(wide, wide) + self.eps)
        self.n = wide * self.r
        return (self.n * gain).astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        n, wide = self.n, widen(grad)
        d = wide * self.gain
        dx = self.r * (d - n * mean_columns(d, n))
        dgain = sum_rows_of_product(wide, n)
        return dx.astype(grad.dtype, copy=False), dgain.astype(grad.dtype, copy=False)


class SwiGLU(Function):
    """[A, B] -> Y = A s B, s = 1 / (1 + exp(-A)); the halves of the last axis are gate and up.

    Shazeer 2020, equation 6: Swish of the gate, times the other product.
    dA = dY B s (1 + A (1 - s)),  dB = dY A s.
    """

    def forward(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        self.a, self.b = widen(x[..., :half]), widen(x[..., half:])
        self.s = (1 + array_module(x).tanh(self.a / 2)) / 2  # exp(-A) may overflow
        return (self.a * self.s * self.b).astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        a, b, s, wide = self.a, self.b, self.s, widen(grad)
        da, db = wide * b * s * (1 + a * (1 - s)), wide * a * s
        return array_module(grad).concatenate([da, db], axis=-1).astype(grad.dtype, copy=False)
