"""Lesson 1's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numbers

import numpy as np

from minidist import Tensor
from minidist.autograd import Function, gradcheck


def draw(*shape):
    return np.random.default_rng(1).standard_normal(shape)


def check_1(attempt):
    class RMSNorm(Function):
        def forward(self, x):
            self.x, self.r = x, np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
            return x / self.r

        def backward(self, grad):
            dx = attempt(grad.copy(), self.x.copy(), self.r.copy())
            if np.shape(dx) != grad.shape:
                raise ValueError(f"dX has the shape {np.shape(dx)}, not {grad.shape}")
            return np.asarray(dx, grad.dtype)

    try:
        gradcheck(lambda x: RMSNorm()(x), draw(3, 5))
    except AssertionError as difference:
        return str(difference)


def solution_1(dy, x, r):
    return dy / r - x * (dy * x).mean(axis=-1, keepdims=True) / r**3


hints_1 = (
    "r depends on every element of the row. So there are two terms; the first is dY / r.",
    "The second goes through r: dr is the sum over the row of dY times -X / r^2.",
    "It is dr times the slope of r along each element, X / (C r), where C is the row's length.",
)


def as_if_r_were_constant(dy, x, r):
    return dy / r


def sum_for_mean(dy, x, r):
    return dy / r - x * (dy * x).sum(axis=-1, keepdims=True) / r**3


tempting_1 = [as_if_r_were_constant, sum_for_mean, lambda dy, x, r: None]


def check_2(attempt):
    for layers, i, a in ((32, 1, 1), (32, 12, 11), (64, 1, 16), (24, 8, 1), (7, 1, 5)):
        held = {k: layers // k * i + k * a for k in range(1, layers + 1) if layers % k == 0}
        found, case = attempt(layers, i, a), f"segment({layers}, {i}, {a})"
        if not isinstance(found, numbers.Real) or found not in held:
            return f"{case}: {layers} layers cannot be cut into segments of {found!r:.60}"
        if held[found] > min(held.values()):
            return f"{case}: {found} holds {held[found]} bytes, and {min(held.values())} will do"


def solution_2(layers, input_bytes, layer_bytes):
    lengths = [k for k in range(1, layers + 1) if layers % k == 0]
    return min(lengths, key=lambda k: layers // k * input_bytes + k * layer_bytes)


hints_2 = (
    "How many bytes does a segment length of k hold? Count the inputs, then one segment's layers.",
    "layers / k * input_bytes + k * layer_bytes, for each k that divides layers.",
    "The square root is the best length only if it divides layers. Else compare the sums.",
)


def nearest_to_the_root(layers, input_bytes, layer_bytes):
    lengths = [k for k in range(1, layers + 1) if layers % k == 0]
    return min(lengths, key=lambda k: abs(k - (layers * input_bytes / layer_bytes) ** 0.5))


def the_root(layers, input_bytes, layer_bytes):
    return (layers * input_bytes / layer_bytes) ** 0.5


tempting_2 = [nearest_to_the_root, the_root, lambda layers, i, a: None]


def check_3(attempt):
    x, y = (Tensor(values, requires_grad=True) for values in draw(2, 4, 3))
    w = Tensor(draw(3, 2), requires_grad=True)
    losses, old = [((one @ w) * (one @ w)).sum() for one in (x, y)], w.data.copy()
    losses[0].backward()
    new = old - 0.1 * w.grad
    attempt(w, 0.1)
    losses[1].backward()
    want = 2 * (y.data @ old) @ old.T  # of |Y w|^2
    if (error := abs(y.grad - want).max() / abs(want).max()) > 1e-12:
        return f"dX of the second batch is off by {error:.0%}"
    if not isinstance(w.data, np.ndarray) or not np.allclose(w.data, new):
        return "dX is right, but w has not moved by lr times its gradient"


def solution_3(w, lr):
    w.data = w.data - lr * w.grad


hints_3 = (
    "The backward of a product reads W. Whose copy of W does a Function keep?",
    "It keeps the array that forward was given. `w.data -= ...` changes this array itself.",
    "Let w.data name a new array; the old one lives as long as a pending backward needs it.",
)


def in_place(w, lr):
    w.data -= lr * w.grad


tempting_3 = [in_place, lambda w, lr: None]
