"""A tensor records how it was computed; backward follows this record, latest function first.

Reverse accumulation (Griewank and Walther, Evaluating Derivatives, 2008, chapter 3): if Y = f(A, B)
and dY is the gradient of a scalar with respect to Y, then f.backward(dY) returns dA and dB. This
file has the tensor (data, backward, operators), the function, and back-propagation, in this order.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from minidist.autograd.deferred import Deferred
from minidist.backend import Array, array_module, as_array, is_float, on_gpu, sum_over

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

NUMBERS = (float, int)
Axis = int | tuple[int, ...] | None
Gradient = Array | Callable[..., Array] | None  # a thunk f(out=None) computes it later
_clock = itertools.count(1)  # an order in which every input precedes its uses


def tick() -> int:
    """Return the clock's next number, larger than the order of every function applied so far."""
    return next(_clock)


class _Recording(threading.local):
    on = True  # one switch per thread, because ranks may be threads


_recording = _Recording()


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Switch the recording of computations on or off inside this context."""
    before, _recording.on = _recording.on, on
    try:
        yield
    finally:
        _recording.on = before


def no_grad() -> AbstractContextManager[None]:
    """Compute without recording inside this context: results do not require gradients."""
    return recording(False)


def is_recording() -> bool:
    return _recording.on


class Tensor:
    """An array, and what backward needs to know about it.

    data           NumPy or CuPy array, any shape
    grad           gradient of the same shape and dtype after backward, or None (which means zero);
                   of a parameter it is a view that its next gradient overwrites: copy to keep it
    requires_grad  whether backward reaches it; a leaf (which no function made) keeps its gradient
    creator        the Function that made it, or None for a leaf
    grad_buffer    where a leaf's first gradient is written, or None (see nn.FlatParameters)
    grad_dtype     None, or the buffer's dtype where gradients are added up in a wider one
    summed         None, or (weak reference to an array, numbers): see `summed_over`
    updated        when a leaf was last changed in place, on the clock of `tick`; 0: never
    ops            the module operators.py; the package sets it, because operators.py imports this
    """

    ops: ModuleType
    grad = None
    grad_buffer = None
    grad_dtype: np.dtype | None = None
    summed = None
    updated = 0
    requires_grad = False
    creator: "Function | None" = None
    hooks = ()
    name = None
    __array_ufunc__ = None  # `array * tensor` is ours to compute, not NumPy's

    def __init__(
        self, data: "ArrayLike | Tensor", requires_grad: bool = False, name: str | None = None
    ):
        self.data = as_array(data.data if isinstance(data, Tensor) else data)
        if requires_grad and not is_float(self.data.dtype):
            raise ValueError(f"only floats have gradients, not {self.data.dtype}; use .astype")
        if requires_grad:
            self.requires_grad = True
        if name is not None:
            self.name = name

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    xp = property(lambda self: array_module(self.data))

    def __repr__(self) -> str:
        note = f", grad_fn={type(self.creator).__name__}" if self.creator else ""
        return f"Tensor({self.data}, dtype={self.dtype}{note})"

    def __len__(self) -> int:
        return len(self.data)

    def __getstate__(self) -> dict:
        """A copied or pickled tensor is a leaf: no graph, no hooks."""
        kept = ("data", "grad", "requires_grad", "name")
        return {key: value for key, value in vars(self).items() if key in kept}

    def __float__(self) -> float:
        return float(self.data)

    def item(self) -> float:
        return self.data.item()

    def detach(self) -> "Tensor":
        """Return a leaf with the same data that does not require a gradient."""
        return Tensor(self.data)

    def add_hook(self, hook: Callable[["Tensor"], None]) -> Callable[[], None]:
        """Call `hook(self)` once per backward, when all contributions to this leaf are added.

        Return a function that removes the hook.
        """
        if self.creator is not None:
            raise ValueError("hooks belong to leaves; this tensor was made by a function")
        self.hooks = (*self.hooks, hook)

        def remove() -> None:
            self.hooks = tuple(h for h in self.hooks if h is not hook)

        return remove

    def backward(self, grad: Array | None = None, deferred: list[Deferred] | None = None) -> None:
        """Add the gradient of <self, grad> to `.grad` of every leaf below; free the graph.

        grad      array of this shape; default 1 for a tensor with one element
        deferred  a list to which parameter gradients are appended as thunks instead of being
                  computed; call them later, one by one or together (`deferred.compute`)
        """
        remaining = {}
        for leaf, contribution in propagate(self, grad, remaining, deferred is not None):
            delivery = Deferred(leaf, contribution, remaining)
            if callable(contribution) and deferred is not None:
                deferred.append(delivery)
            else:
                delivery()
            contribution = delivery = None  # the array must not outlive its delivery

    def accumulate(self, contribution: Gradient) -> None:
        """Add an array, or what a thunk returns, to `.grad`; never write to a foreign array."""
        if callable(contribution):
            fresh = self.grad is None and self.grad_buffer is not None and self.grad_dtype is None
            contribution = contribution(out=self.grad_buffer) if fresh else contribution()
        contribution = as_array(unbroadcast(contribution, self.shape))
        over = None if self.summed is None else self.summed_over
        if self.grad is not None and self.grad is not self.grad_buffer:
            self.grad = self.grad + contribution
        elif self.grad is not None:
            self.grad += contribution
        elif self.grad_buffer is None:
            self.grad = contribution.copy()
        else:
            self.grad = self.grad_buffer
            if contribution is not self.grad_buffer:
                self.grad[...] = contribution
        if over is not None:
            self.note_sum(over)

    @property
    def summed_over(self) -> frozenset[int]:
        """The ranks that `note_sum` recorded for `.grad`; later additions do not erase them."""
        noted = self.summed is not None and self.grad is not None and self.summed[0]() is self.grad
        return self.summed[1] if noted else frozenset()

    def note_sum(self, over: frozenset[int]) -> None:
        """Record that the array in `.grad` now is a sum over these, for example ranks."""
        self.summed = None if self.grad is None else (weakref.ref(self.grad), over)

    # fmt: off
    # The operators; operators.py has their forward and backward.
    def __add__(self, other) -> "Tensor": return self.ops.Add()(self, other)
    def __sub__(self, other) -> "Tensor": return self.ops.Subtract()(self, other)
    def __mul__(self, other) -> "Tensor": return self.ops.Multiply()(self, other)
    def __truediv__(self, other) -> "Tensor": return self.ops.Divide()(self, other)
    def __pow__(self, exponent: float) -> "Tensor": return self.ops.Power(exponent)(self)
    def __matmul__(self, other) -> "Tensor": return self.ops.MatMul()(self, other)
    def __neg__(self) -> "Tensor": return self.ops.Multiply()(self, -1)
    def __radd__(self, other) -> "Tensor": return self.ops.Add()(other, self)
    def __rsub__(self, other) -> "Tensor": return self.ops.Subtract()(other, self)
    def __rmul__(self, other) -> "Tensor": return self.ops.Multiply()(other, self)
    def __rtruediv__(self, other) -> "Tensor": return self.ops.Divide()(other, self)
    def __rmatmul__(self, other) -> "Tensor": return self.ops.MatMul()(other, self)
    def __getitem__(self, index) -> "Tensor": return self.ops.GetItem(index)(self)
    def exp(self) -> "Tensor": return self.ops.Exp()(self)
    def log(self) -> "Tensor": return self.ops.Log()(self)
    # fmt: on

    def sum(self, axis: Axis = None, keepdims: bool = False) -> "Tensor":
        return self.ops.Sum(axis, keepdims)(self)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> "Tensor":
        return self.ops.Mean(axis, keepdims)(self)

    def max(self, axis: Axis = None, keepdims: bool = False) -> "Tensor":
        return self.ops.Max(axis, keepdims)(self)

    def reshape(self, *shape: int | tuple[int, ...]) -> "Tensor":
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.ops.Reshape(shape)(self)

    def transpose(self, *axes: int | tuple[int, ...]) -> "Tensor":
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return self.ops.Transpose(axes)(self)

    T = property(transpose)


class Function:
    """A differentiable operation; an instance is one node of the graph: `MatMul()(a, b)`.

    Options go to the constructor. `forward(self, *arrays)` returns an array and keeps on self what
    backward needs; `backward(self, grad)` returns one gradient per input; a single one needs no
    tuple. A gradient may have the broadcast shape: the engine sums it down. It may be a thunk
    `f(out=None)` that closes over arrays (not over self, which is freed): the engine calls it at
    once, or defers it. `self.inputs[i]` is where the gradient of input i goes: a leaf, the function
    that made the input (not the input itself, so that its data can be freed), or None if it needs
    no gradient.
    """

    inputs = None
    deferring = False  # set for backward: whether the thunks among its results will wait

    def forward(self, *arrays: Array) -> Array:
        raise NotImplementedError

    def backward(self, grad: Array) -> Gradient | tuple[Gradient, ...]:
        raise NotImplementedError

    def __call__(self, *inputs: "Tensor | ArrayLike") -> Tensor:
        """Apply to tensors; Python numbers take their dtype, arrays must already have it."""
        arrays, edges, dtype, tracked, mixed = [], [], None, False, False
        for x in inputs:
            if isinstance(x, Tensor):
                edges.append((x.creator or x) if x.requires_grad else None)
                tracked = tracked or x.requires_grad
                x = x.data
            elif isinstance(x, NUMBERS):
                edges.append(None)
                # np.float64 is a float, but not a weak one
                arrays.append(float(x) if isinstance(x, np.floating) else x)
                continue
            else:
                edges.append(None)
                x = as_array(x)
            arrays.append(x)
            if dtype is None:
                dtype, kind = x.dtype, type(x)
            elif x.dtype != dtype:
                raise ValueError(
                    f"{type(self).__name__} of {dtype} and {x.dtype}; use .astype on one of them"
                )
            elif type(x) is not kind:
                mixed = True
        if mixed:
            arrays = self._on_one_device(inputs, arrays)
        out = Tensor.__new__(Tensor)
        out.data = as_array(self.forward(*arrays))
        if tracked and _recording.on:
            out.requires_grad = True
            out.creator = self
            self.inputs, self.result_shape = edges, out.data.shape
            self.order = next(_clock)
        return out

    def _on_one_device(self, inputs: tuple, arrays: list) -> list:
        """If some are on a GPU, make the host's scalars numbers; ValueError for its arrays."""
        if not any(on_gpu(x) for x in arrays):
            return arrays  # of subclasses of numpy.ndarray
        for i, (given, x) in enumerate(zip(inputs, arrays, strict=True)):
            if isinstance(x, np.ndarray):
                if x.ndim or isinstance(given, Tensor):
                    raise ValueError(
                        f"{type(self).__name__} of an array on the host, {x.dtype}{list(x.shape)}, "
                        "and one on a GPU; move one of them with backend.to_device, or a model "
                        "with model.to"
                    )
                arrays[i] = x.item()
        return arrays


def propagate(
    root: Tensor, grad: Array | None, remaining: dict[Tensor, int], deferring: bool = False
) -> Iterator[tuple[Tensor, Gradient]]:
    """Yield (leaf, contribution) per edge into a leaf below root: array, thunk, or None.

    `remaining` is filled first with the number of contributions that each leaf will get. Iterative,
    so that only memory bounds the depth; a function is freed as soon as its backward is done.
    """
    if not root.requires_grad:
        raise ValueError("this tensor does not depend on anything that requires a gradient")
    if grad is None and root.size != 1:
        raise ValueError(
            f"backward needs grad= of shape {root.shape}: only one element may default to 1"
        )
    grad = root.xp.ones_like(root.data) if grad is None else as_array(grad)
    if on_gpu(grad) != on_gpu(root.data):
        raise ValueError(
            "grad and the tensor are not on the same device: one is on the host, one on a GPU; "
            "move grad with backend.to_device"
        )
    if grad.shape != root.shape or grad.dtype != root.dtype:
        raise ValueError(
            f"grad is {grad.dtype}{list(grad.shape)}, the tensor is {root.dtype}{list(root.shape)}"
        )
    if root.creator is None:
        remaining[root] = 1
        yield root, grad
        return
    functions = functions_below(root, remaining)
    pending = {root.creator: grad}
    while functions:
        function = functions.pop()
        grad = pending.pop(function, None)
        function.deferring = deferring
        gradients = function.backward(grad) if grad is not None else (None,) * len(function.inputs)
        inputs = function.inputs
        function.__dict__.clear()
        if type(gradients) is not tuple:
            gradients = (gradients,)
        if len(gradients) != len(inputs):
            raise ValueError(
                f"{type(function).__name__}.backward must return a gradient, or None, for each "
                f"input of forward: {len(inputs)}, not {len(gradients)}"
            )
        for source, dx in zip(inputs, gradients, strict=True):
            if isinstance(source, Tensor):
                yield source, dx
            elif source is not None and dx is not None:
                dx = dx() if callable(dx) else dx
                if dx.shape != source.result_shape:
                    dx = unbroadcast(dx, source.result_shape)
                pending[source] = pending[source] + dx if source in pending else dx
        grad = gradients = dx = None  # nothing of this function lives while the next one works


def functions_below(root: Tensor, remaining: dict[Tensor, int] | None = None) -> list[Function]:
    """Return the functions that root depends on, earliest first; count the edges into each leaf."""
    remaining = {} if remaining is None else remaining
    seen, stack = {root.creator}, [root.creator]
    while stack:
        function = stack.pop()
        if function.inputs is None:
            raise ValueError(
                "an earlier backward has already freed this graph; "
                "add losses up and call backward once, or run the forward pass again"
            )
        for source in function.inputs:
            if isinstance(source, Tensor):
                remaining[source] = remaining.get(source, 0) + 1
                if source.updated > function.order:
                    raise ValueError(
                        f"{source.name} was updated after the forward pass that this backward "
                        "belongs to, so the gradient would mix old and new weights; run the "
                        "forward pass again"
                    )
            elif source is not None and source not in seen:
                seen.add(source)
                stack.append(source)
    return sorted(seen, key=attrgetter("order"))


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which its input was repeated."""
    if grad.shape == shape:
        return grad
    grad = sum_over(grad, axis=tuple(range(grad.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return sum_over(grad, axis=axes, keepdims=True) if axes else grad
