"""The operations behind a tensor's operators and methods, each forward beside its adjoint.

Baydin et al., Automatic Differentiation in Machine Learning (JMLR 2018), section 3.2.

Y is the result, dY its gradient. Inputs broadcast; the engine sums a gradient back down to its
input's shape.
"""

import numpy as np

from minidist.autograd.checks import check_axes, check_exponent, check_index, is_basic
from minidist.autograd.deferred import Gradient
from minidist.autograd.tensor import Axis, Function
from minidist.backend import Array, add_at, array_module, matmul, mean_over, sum_over, widen
from minidist.errors import WrongInput


class Add(Function):
    """Y = A + B  =>  dA = dY, dB = dY."""

    def forward(self, a: Array, b: Array) -> Array:
        return a + b

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        return grad, grad


class Subtract(Function):
    """Y = A - B  =>  dA = dY, dB = -dY."""

    def forward(self, a: Array, b: Array) -> Array:
        return a - b

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        return grad, -grad


class Multiply(Function):
    """Y = A B, elementwise  =>  dA = dY B, dB = dY A."""

    def forward(self, a: Array, b: Array) -> Array:
        self.a, self.b = a, b
        return a * b

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        da = None if self.inputs[0] is None else grad * self.b
        return da, None if self.inputs[1] is None else grad * self.a


class Divide(Function):
    """Y = A / B, elementwise  =>  dA = dY / B, dB = -dY Y / B."""

    def forward(self, a: Array, b: Array) -> Array:
        self.b, self.y = b, a / b
        return self.y

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        da = grad / self.b
        return da, None if self.inputs[1] is None else -da * self.y


class Power(Function):
    """Y = A ** n for a number n  =>  dA = n A ** (n - 1) dY."""

    def __init__(self, exponent: float):
        self.exponent = check_exponent(exponent)

    def forward(self, a: Array) -> Array:
        self.a = a
        return a * a if self.exponent == 2 else a**self.exponent

    def backward(self, grad: Array) -> Array:
        n = self.exponent
        if n == 0:
            return grad * (0 * self.a)  # a ** -1 would be inf at 0
        return grad * (2 * self.a if n == 2 else n * self.a ** (n - 1))


class MatMul(Function):
    """Y = A B  =>  dA = dY B^T, dB = A^T dY  (last two axes; batch axes broadcast)."""

    def forward(self, a: Array, b: Array) -> Array:
        if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2]:
            raise WrongInput(
                f"cannot multiply {list(a.shape)} by {list(b.shape)}: both need two axes or more, "
                "and the columns of the first must be the rows of the second; "
                "use reshape or transpose"
            )
        self.a, self.b = a, b
        return matmul(a, b)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        a, b = self.a, self.b
        da = None if self.inputs[0] is None else matmul(grad, b.swapaxes(-1, -2))
        return da, None if self.inputs[1] is None else matmul(a.swapaxes(-1, -2), grad)


class Reduction(Function):
    """Axes are None (all), an int, or a tuple of ints; `keepdims` keeps them with length 1."""

    shape: tuple[int, ...]

    def __init__(self, axis: Axis = None, keepdims: bool = False):
        self.axis, self.keepdims = axis, keepdims

    def keep_axes(self, y: Array) -> Array:
        """Give a reduced array its reduced axes back, with length 1."""
        if self.keepdims:
            return y
        if self.axis is None:
            return y.reshape([1] * len(self.shape))
        return array_module(y).expand_dims(y, self.axis)


class Sum(Reduction):
    """Y = sum of A over axes  =>  dA = dY, repeated over them."""

    def forward(self, a: Array) -> Array:
        self.shape = check_axes(self.axis, a.shape)
        return sum_over(a, self.axis, self.keepdims)

    def backward(self, grad: Array) -> Array:
        return array_module(grad).broadcast_to(self.keep_axes(grad), self.shape)


class Mean(Reduction):
    """Y = mean of A over axes, n elements each  =>  dA = dY / n, repeated over them."""

    def forward(self, a: Array) -> Array:
        self.shape = check_axes(self.axis, a.shape)
        y = mean_over(a, self.axis, self.keepdims)
        self.n = a.size // y.size if y.size else 1
        return y

    def backward(self, grad: Array) -> Array:
        each = (widen(self.keep_axes(grad)) / self.n).astype(grad.dtype, copy=False)
        return array_module(grad).broadcast_to(each, self.shape)


class Max(Reduction):
    """Y = max of A over axes  =>  dA = dY where A is the maximum, shared equally among ties."""

    def forward(self, a: Array) -> Array:
        self.shape, self.a = check_axes(self.axis, a.shape), a
        self.y = a.max(axis=self.axis, keepdims=self.keepdims)
        return self.y

    def backward(self, grad: Array) -> Array:
        chosen = widen((self.a == self.keep_axes(self.y)).astype(grad.dtype))
        share = chosen / chosen.sum(axis=self.axis, keepdims=True)
        return (self.keep_axes(grad) * share).astype(grad.dtype, copy=False)


class Exp(Function):
    """Y = exp A  =>  dA = dY Y."""

    def forward(self, a: Array) -> Array:
        self.y = array_module(a).exp(a)
        return self.y

    def backward(self, grad: Array) -> Array:
        return grad * self.y


class Log(Function):
    """Y = log A  =>  dA = dY / A."""

    def forward(self, a: Array) -> Array:
        self.a = a
        return array_module(a).log(a)

    def backward(self, grad: Array) -> Array:
        return grad / self.a


class Reshape(Function):
    """Y = A's elements in row-major order in another shape  =>  dA = dY in A's shape."""

    def __init__(self, shape: tuple[int, ...]):
        self.new_shape = shape

    def forward(self, a: Array) -> Array:
        self.shape = a.shape
        return a.reshape(self.new_shape)

    def backward(self, grad: Array) -> Array:
        return grad.reshape(self.shape)


class Transpose(Function):
    """Y = A, axes permuted (default: reversed)  =>  dA = dY, axes permuted back."""

    def __init__(self, axes: tuple[int, ...] | None = None):
        self.axes = tuple(axes) if axes else None

    def forward(self, a: Array) -> Array:
        return a.transpose(self.axes)

    def backward(self, grad: Array) -> Array:
        if self.axes is None:
            return grad.transpose()
        return grad.transpose(np.argsort([axis % grad.ndim for axis in self.axes]).tolist())


class GetItem(Function):
    """Y = A[index], basic or advanced  =>  dA = 0, plus dY at index (repeats add up).

    On a GPU repeats are added with atomics, so the last bits vary.
    """

    def __init__(self, index):
        self.index = index

    def forward(self, a: Array) -> Array:
        self.shape = a.shape
        check_index(self.index, a)
        return a[self.index]

    def backward(self, grad: Array) -> Gradient:
        shape, index = self.shape, self.index

        def da(out=None):
            xp = array_module(grad)
            out = xp.empty(shape, grad.dtype) if out is None else out
            out.fill(0)
            if is_basic(index):
                out[index] = grad
            else:
                add_at(out, index, grad)
            return out

        return da


class Concatenate(Function):
    """Y = the inputs A_i one after the other along an axis  =>  dA_i = the i-th piece of dY."""

    def __init__(self, axis: int = 0):
        self.axis = axis

    def forward(self, *arrays: Array) -> Array:
        lengths = [check_axes(self.axis, a.shape)[self.axis] for a in arrays]
        self.ends = np.cumsum(lengths)[:-1].tolist()
        return array_module(*arrays).concatenate(arrays, axis=self.axis)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        return tuple(array_module(grad).split(grad, self.ends, axis=self.axis))
