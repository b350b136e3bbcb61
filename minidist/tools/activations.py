"""What a graph keeps between forward and backward, array by array."""

import numpy as np

from minidist.autograd import Tensor, functions_below


def kept(*outputs: Tensor) -> list[tuple[str, np.ndarray]]:
    """Return ("Function.attribute", array) of the arrays that backward from the outputs will read.

    Every buffer comes once and whole, however many views of it there are. Leaves, which somebody
    else holds, do not count: parameters, and inputs that have a gradient.
    """
    functions = [function for y in outputs for function in functions_below(y)]
    leaves = (x for function in functions for x in function.inputs if isinstance(x, Tensor))
    seen, found = {id(_owner(x.data)) for x in leaves}, []
    for function in functions:
        for name, value in vars(function).items():
            for array in map(_owner, _arrays(value)):
                if id(array) not in seen:
                    seen.add(id(array))
                    found.append((f"{type(function).__name__}.{name}", array))
    return found


def kept_bytes(*outputs: Tensor) -> int:
    return sum(array.nbytes for _, array in kept(*outputs))


def _arrays(value) -> list[np.ndarray]:
    if isinstance(value, tuple | list):
        return [array for item in value for array in _arrays(item)]
    return [value] if isinstance(value, np.ndarray) else []


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
