"""What a graph keeps between forward and backward, array by array; and recomputing it instead.

The field calls it activation checkpointing, gradient checkpointing or rematerialisation. Chen et
al., Training Deep Nets with Sublinear Memory Cost (2016), section 4: n layers in segments of k keep
n/k inputs plus the activations of one segment, for one more forward pass. The gradients are the
same, to the bit.
"""

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType

from minidist.autograd.deferred import Gradient, Product
from minidist.autograd.recording import no_grad, recording
from minidist.autograd.tensor import Function, Tensor, functions_below, propagate, unbroadcast
from minidist.backend import Array, into, is_array
from minidist.errors import WrongInput


def kept(*outputs: Tensor) -> list[tuple[str, Array]]:
    """Return ("Function.attribute", array) for each array that backward from the outputs will read.

    Every buffer is returned once and whole, however many views of it there are. Leaves do not
    count, because others hold them: parameters, and inputs that have a gradient.
    """
    functions = [function for y in outputs for function in functions_below(y)]
    inputs = [x for function in functions for x in getattr(function, "inputs", ())]
    leaves = [x for x in inputs if isinstance(x, Tensor)]
    seen, buffers = {id(owner(x.data)) for x in leaves}, []
    for function in functions:
        for name, value in vars(function).items():
            for array in map(owner, arrays(value)):
                if name != "inputs" and id(array) not in seen:
                    seen.add(id(array))
                    buffers.append((f"{type(function).__name__}.{name}", array))
    return buffers


def kept_bytes(*outputs: Tensor) -> int:
    return sum(array.nbytes for _, array in kept(*outputs))


def arrays(value) -> Iterator[Array]:
    """Yield the arrays in what a Function saves: in tuples, deferred products, closures."""
    match value:
        case _ if is_array(value):
            yield value
        case tuple() | list():
            for item in value:
                yield from arrays(item)
        case Product(a=a, b=b):
            yield from arrays((a, b))
        case FunctionType(__closure__=cells):
            yield from arrays([cell.cell_contents for cell in cells or ()])


def owner(array: Array) -> Array:
    """Return the array that owns the memory of this view."""
    while is_array(array.base):
        array = array.base
    return array


def recompute(
    function: Callable[..., Tensor], *inputs, parameters: Iterable[Tensor] | None = None
) -> Tensor:
    """Return function(*inputs), storing only the inputs for backward.

    function    a module, or any callable on tensors that gives the same result when called again
    inputs      tensors and other arguments
    parameters  the leaves that it uses besides its inputs; by default `function.parameters()`,
                or none if it has no such method
    """
    if parameters is None:
        parameters = function.parameters() if hasattr(function, "parameters") else []
    leaves = dict.fromkeys(p for p in parameters if p.requires_grad)  # each once, also if tied
    return Recompute(function, inputs)(*differentiable(inputs), *leaves)


def differentiable(arguments: Iterable) -> list[Tensor]:
    """Return the tensors among the arguments that need a gradient, each once."""
    return list(dict.fromkeys(x for x in arguments if isinstance(x, Tensor) and x.requires_grad))


class Recompute(Function):
    """Y = f(X; W)  =>  run f again, recording the graph, and back-propagate through it."""

    def __init__(self, function: Callable[..., Tensor], arguments: tuple):
        self.function, self.arguments = function, arguments

    def forward(self, *arrays: Array) -> Array:
        with no_grad():
            return self.function(*self.arguments).data

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        function, tensors = self.function, differentiable(self.arguments)
        fresh = {id(x): Tensor(x.data, requires_grad=True) for x in tensors}
        with recording(True):
            again = function(*[fresh.get(id(x), x) for x in self.arguments])
        parameters = self.inputs[len(tensors) :]
        totals = dict.fromkeys([*fresh.values(), *parameters])
        for leaf, contribution in propagate(again, grad, {}, self.deferring):
            if leaf not in totals:
                raise WrongInput(
                    f"recompute: the function used the parameter {leaf.name or leaf!r} "
                    "without being told; pass it in parameters="
                )
            if callable(contribution) and not self.deferring:
                contribution = contribution()
            if contribution is not None and not callable(contribution):
                contribution = unbroadcast(contribution, leaf.shape)  # two may differ in shape
            totals[leaf] = _sum(totals[leaf], contribution)
        return tuple(totals[leaf] for leaf in [*fresh.values(), *parameters])


def _sum(a: Gradient, b: Gradient) -> Gradient:
    """Add two gradients: arrays, thunks or None; the sum is a thunk if one of them is."""
    if a is None or b is None:
        return b if a is None else a
    if not callable(a) and not callable(b):
        return a + b

    def total(out=None):
        return into(out, (a() if callable(a) else a) + (b() if callable(b) else b))

    return total
