"""Functions by element (CuPy: _core/_kernel.pyx, ufunc), computed by NumPy's of the same name.

The loops, hence the dtypes, are the wheel's. Keywords that CuPy lacks (`where`, `initial`) are not
there, results are always C-contiguous, and nothing warns of overflow or division by zero.
"""

import re
from functools import cached_property
from pathlib import Path

import numpy as np

from ._storage import launch, operand, store

LOOPS = Path(__file__).parents[1] / "ufuncs.txt"  # of each name, `types` of CuPy 14's wheel
WEAK = (int, float, complex)
KINDS = {bool: 0, int: 1, float: 2, complex: 2, np.bool_: 0, np.integer: 1, np.inexact: 2}


def kind(t: type) -> int:
    """Return 0 for bool, 1 for integers, 2 for the rest (_kernel.pyx:_get_kind_score)."""
    return next(score for base, score in KINDS.items() if issubclass(t, base))


class ufunc:
    """A function by element; call it, or `at`, `reduce`."""

    def __init__(self, name: str, function=None, path: str = "cupy"):
        self.__name__ = self.name = name
        self._numpy, self._path = function or getattr(np, name), f"{path}.{name}"
        self._found = {}

    @cached_property
    def _loops(self) -> list[tuple[str, str]]:
        """Return ("ff", "f") for ff->f and so on, in the order in which CuPy tries them."""
        (line,) = re.findall(rf"^{re.escape(self._path)} (.*)$", LOOPS.read_text(), re.M)
        return [tuple(word.split("->")) for word in line.split() if "V" not in word]

    @cached_property
    def nin(self) -> int:
        return len(self._loops[0][0])

    def __repr__(self):
        return f"<ufunc 'cupy_{self.name}'>"

    def __call__(self, *args, out=None, dtype=None, casting="same_kind"):
        """Compute; every argument is an array of this device or a scalar (ufunc.__call__)."""
        if not self.nin <= len(args) <= self.nin + 1:
            raise TypeError(f"Wrong number of arguments for {self.name!r}")
        inputs = [operand(x) for x in args[: self.nin]]
        out = args[-1] if len(args) > self.nin else out
        ins, result = self._loop(inputs, dtype)
        with np.errstate(all="ignore"):
            values = [np.asarray(x).astype(t, copy=False) for x, t in zip(inputs, ins, strict=True)]
            host = np.asarray(self._numpy(*values, order="C")).astype(result, copy=False)
        return launch(host) if out is None else store(out, host, casting)

    def _loop(self, inputs, dtype):
        """Return the dtypes of the first loop that fits (_Ops.guess_routine)."""
        if dtype is not None:
            fitting = (loop for loop in self._loops if np.dtype(loop[1]) == dtype)
            found = next(fitting, None)
        else:
            weak = tuple(type(x) if type(x) in WEAK else None for x in inputs)
            types = tuple(np.asarray(x).dtype for x in inputs)
            key = types, weak
            if key not in self._found:
                self._found[key] = self._first(types, weak)
            found = self._found[key]
        if found is None:
            raise TypeError(f"Wrong type ({dtype or types}) of arguments for cupy_{self.name}")
        return found

    def _first(self, types, weak):
        """Return the first loop to which all can be cast safely (_guess_routine_from_in_types).

        A Python scalar takes the arrays' dtype, unless its kind is higher (NumPy's NEP 50).
        """
        strong = [kind(t.type) for t, w in zip(types, weak, strict=True) if w is None]
        scalars = [kind(w) for w in weak if w is not None]
        if not strong or (scalars and max(scalars) > max(strong)):
            weak = [None] * len(weak)
        for ins, result in self._loops:
            wanted = [np.dtype(c) for c in ins]
            if all(map(fits, types, weak, wanted)):
                return wanted, np.dtype(result)
        return None

    def at(self, a, indices, b=None):
        """Add to elements, repeats too (ufunc.at); only `add` is in use."""
        if self.name != "add":
            raise NotImplementedError(f"`cupy_{self.name}.at` is not supported yet")
        a._scatter_add(indices, b)

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        if self.name not in ("add", "multiply"):
            raise NotImplementedError(f"`cupy_{self.name}.reduce` is not supported yet")
        method = array.sum if self.name == "add" else array.prod
        return method(axis, dtype, out, keepdims)


def fits(given: np.dtype, weak: type | None, wanted: np.dtype) -> bool:
    if np.can_cast(given, wanted):
        return True
    return weak is not None and np.result_type(weak(0), wanted) == wanted


NAMES = """absolute add bitwise_and bitwise_or bitwise_xor divide equal exp floor_divide greater
    greater_equal invert isfinite isinf isnan left_shift less less_equal log logical_or maximum
    minimum multiply negative not_equal positive power reciprocal remainder right_shift rint sqrt
    square subtract tanh true_divide""".split()
UFUNCS = {name: ufunc(name) for name in NAMES}
