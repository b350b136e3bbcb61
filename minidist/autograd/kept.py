"""What a graph keeps between forward and backward, array by array."""

from collections.abc import Iterator
from types import FunctionType

from minidist.autograd import Tensor, functions_below
from minidist.autograd.deferred import Product
from minidist.backend import Array, is_array


def kept(*outputs: Tensor) -> list[tuple[str, Array]]:
    """Return ("Function.attribute", array) for each array that backward from the outputs will read.

    Every buffer is returned once and whole, however many views of it there are. Leaves do not
    count, because others hold them: parameters, and inputs that have a gradient.
    """
    functions = [function for y in outputs for function in functions_below(y)]
    inputs = [x for function in functions for x in getattr(function, "inputs", ())]
    leaves = [x for x in inputs if isinstance(x, Tensor)]
    seen, found = {id(owner(x.data)) for x in leaves}, []
    for function in functions:
        for name, value in vars(function).items():
            for array in map(owner, arrays(value)):
                if name != "inputs" and id(array) not in seen:
                    seen.add(id(array))
                    found.append((f"{type(function).__name__}.{name}", array))
    return found


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
