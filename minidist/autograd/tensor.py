"""A tensor records how it was computed; backward follows this record, latest function first.

Reverse accumulation (Griewank and Walther, Evaluating Derivatives, 2008, chapter 3): if Y = f(A, B)
and dY is the gradient of a scalar with respect to Y, then f.backward(dY) returns dA and dB. This
file has the tensor, the function, and back-propagation, in this order; operators.py has what
`a + b` and `a.sum()` apply.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Self, TypeAlias

from minidist.autograd import checks
from minidist.autograd.deferred import Deferred, Gradient, deliver
from minidist.autograd.number_format import NumberFormat
from minidist.autograd.recording import switch, tick
from minidist.backend import Array, array_module, as_array, sum_over
from minidist.errors import WrongInput

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Edge: TypeAlias = "Tensor | Function | None"  # where the gradient of an input goes
Axis = int | tuple[int, ...] | None


class Tensor:
    """An array, and what backward needs to know about it.

    data           NumPy or CuPy array, any shape
    grad           gradient of the same shape and dtype after backward, or None (which means zero)
    requires_grad  whether backward reaches it; a leaf (which no function made) keeps its gradient
    creator        the Function that made it, or None for a leaf
    updated        when a leaf was last changed in place, on the clock of `tick`; 0: never
    format         the NumberFormat of products with it
    ops            operators.py, set by the package because that module imports this one
    """

    data: Array
    grad: Array | None = None
    updated = 0
    requires_grad = False
    creator: "Function | None" = None
    hooks: tuple[Callable, ...] = ()
    format = NumberFormat()
    name: str | None = None
    ops: ModuleType
    __array_ufunc__ = None  # `array * tensor` is ours to compute, not NumPy's
    __hash__ = object.__hash__  # a tensor may be a key: it is equal to itself alone
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = checks.no_comparison
    __eq__ = checks.only_itself
    __array__ = __array_function__ = checks.no_numpy
    __rpow__ = checks.no_exponent

    def __init__(
        self, data: "ArrayLike | Tensor", requires_grad: bool = False, name: str | None = None
    ):
        self.data = checks.numbers(data, requires_grad)
        self.requires_grad, self.name = requires_grad, name

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

    def add_hook(self, hook: Callable[[Self], None]) -> Callable[[], None]:
        """Call `hook(self)` once per backward, when all contributions to this leaf are added.

        Return a function that removes the hook.
        """
        if self.creator is not None:
            raise WrongInput("hooks belong to leaves; this tensor was made by a function")
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
        remaining: dict[Tensor, int] = {}
        for leaf, contribution in propagate(self, grad, remaining, deferred is not None):
            if deferred is not None and callable(contribution):
                deferred.append(Deferred(leaf, contribution, remaining))
            else:
                deliver(leaf, contribution, remaining)  # and after the last one call its hooks
            del contribution  # the array must not outlive its delivery

    def accumulate(self, contribution: Gradient) -> None:
        """Add an array, or a thunk's result, to `.grad`; write to no array that others may hold.

        A Parameter's first contribution goes into its layer's gradient vector (nn/parameter.py).
        """
        dx = contribution() if callable(contribution) else contribution
        dx = as_array(unbroadcast(dx, self.data.shape))
        self.grad = dx.copy() if self.grad is None else self.grad + dx

    # fmt: off
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
    `f(out=None)` that closes over arrays (not over self, whose attributes are cleared after use):
    the engine calls it at once, or defers it. `self.inputs[i]` is where the gradient of input i
    goes: a leaf, the function that made the input (not the input itself, so that its data can be
    freed), or None if it needs no gradient.
    """

    inputs: Sequence[Edge] = ()
    deferring = False  # set for backward: whether thunks that backward returns are deferred

    def forward(self, *arrays: Array) -> Array:
        raise NotImplementedError

    def backward(self, grad: Array) -> Gradient | tuple[Gradient, ...]:
        raise NotImplementedError

    def __call__(self, *inputs: "Tensor | ArrayLike") -> Tensor:
        """Apply to tensors; Python numbers take their dtype, arrays must already have it."""
        arrays: list = []
        edges: list[Edge] = []
        recorded = False
        for x in inputs:
            edge: Edge = None
            if isinstance(x, Tensor):
                if x.requires_grad:
                    edge, recorded = x.creator or x, switch.on
                x = x.data
            arrays.append(x)
            edges.append(edge)
        y = self.forward(*checks.alike(self, arrays, inputs))
        out = Tensor.__new__(Tensor)
        out.data = y = as_array(y)
        if recorded:
            out.requires_grad, out.creator = True, self
            self.inputs, self.result_shape, self.order = edges, y.shape, tick()
        return out


def propagate(
    root: Tensor, grad: Array | None, remaining: dict[Tensor, int], deferring: bool = False
) -> Iterator[tuple[Tensor, Gradient]]:
    """Yield (leaf, contribution) per edge into a leaf below root: array, thunk, or None.

    `remaining` gets each leaf's number of contributions first. A function is freed after its use.
    """
    grad = checks.first_gradient(root, grad)
    if root.creator is None:
        remaining[root] = 1
        yield root, grad
        return
    functions = functions_below(root, remaining)
    pending = {root.creator: grad}
    while functions:
        function = functions.pop()
        inputs, grad = function.inputs, pending.pop(function, None)
        function.deferring = deferring
        gradients = (None,) * len(inputs) if grad is None else function.backward(grad)
        gradients = gradients if type(gradients) is tuple else (gradients,)
        if len(gradients) != len(inputs):
            raise checks.not_one_per_input(function, gradients)
        function.__dict__.clear()  # frees what forward kept
        for i, source in enumerate(inputs):
            dx = gradients[i]
            if isinstance(source, Tensor):
                yield source, dx
            elif source is not None and dx is not None:
                dx = unbroadcast(dx() if callable(dx) else dx, source.result_shape)
                pending[source] = pending[source] + dx if source in pending else dx
        grad = gradients = dx = None  # nothing of this function lives while the next one works


def functions_below(root: Tensor, remaining: dict[Tensor, int] | None = None) -> list[Function]:
    """Return the functions that root depends on, earliest first; count the edges into each leaf."""
    remaining = {} if remaining is None else remaining
    seen: dict[Function, None] = {}  # as found: nearly sorted, latest first
    stack = [] if root.creator is None else [root.creator]
    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen[function] = None
        if not function.inputs:
            raise checks.freed()
        for source in function.inputs:
            if isinstance(source, Tensor):
                remaining[source] = remaining.get(source, 0) + 1
                if source.updated > function.order:
                    raise checks.updated_since(source)
            elif source is not None:
                stack.append(source)
    return sorted(seen, key=attrgetter("order"))


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which its input was repeated."""
    if grad.shape == shape:
        return grad
    grad = sum_over(grad, axis=tuple(range(grad.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return sum_over(grad, axis=axes, keepdims=True) if axes else grad
