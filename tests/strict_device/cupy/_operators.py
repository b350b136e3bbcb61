"""Operators of device arrays (CuPy: _core/core.pyx, from __add__ to __ixor__)."""

import numpy as np

from ._storage import Storage
from ._ufunc import UFUNCS

FAST_POWERS = {
    (int, 2): "square",
    (float, 2.0): "square",
    (float, 0.5): "sqrt",
    (float, -1.0): "reciprocal",
}


def defers_to(x, other) -> bool:
    """Return whether the other operand's method is called instead (_should_use_rop)."""
    if hasattr(other, "__array_ufunc__"):
        return other.__array_ufunc__ is None
    return x.__array_priority__ < getattr(other, "__array_priority__", 0)


def binary(name: str, reflected: bool = False):
    """Return the operator's method; what is no device array goes through NumPy's protocol."""

    def method(self, other):
        if isinstance(other, Storage):
            return UFUNCS[name](self, other)
        if defers_to(self, other):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        return getattr(np, name)(*pair)

    return method


def in_place(name: str):
    return lambda self, other: UFUNCS[name](self, other, self)


def unary(name: str):
    return lambda self: UFUNCS[name](self)


class Operators(Storage):
    """x + y with a device array or a scalar; NumPy arrays and lists are refused."""

    __slots__ = ()

    __neg__, __pos__, __abs__, __invert__ = map(unary, "negative positive absolute invert".split())

    __add__, __radd__, __iadd__ = binary("add"), binary("add", True), in_place("add")
    __sub__, __rsub__ = binary("subtract"), binary("subtract", True)
    __mul__, __rmul__ = binary("multiply"), binary("multiply", True)
    __truediv__, __rtruediv__ = binary("true_divide"), binary("true_divide", True)
    __floordiv__, __rfloordiv__ = binary("floor_divide"), binary("floor_divide", True)
    __mod__, __rmod__ = binary("remainder"), binary("remainder", True)
    __rpow__ = binary("power", True)
    __lshift__, __rlshift__ = binary("left_shift"), binary("left_shift", True)
    __rshift__, __rrshift__ = binary("right_shift"), binary("right_shift", True)
    __and__, __rand__ = binary("bitwise_and"), binary("bitwise_and", True)
    __or__, __ror__ = binary("bitwise_or"), binary("bitwise_or", True)
    __xor__, __rxor__ = binary("bitwise_xor"), binary("bitwise_xor", True)

    __isub__, __imul__, __itruediv__ = map(in_place, "subtract multiply true_divide".split())
    __ifloordiv__, __imod__, __ipow__ = map(in_place, "floor_divide remainder power".split())
    __iand__, __ior__, __ixor__ = map(in_place, "bitwise_and bitwise_or bitwise_xor".split())
    __ilshift__, __irshift__ = map(in_place, "left_shift right_shift".split())

    __lt__, __le__ = binary("less"), binary("less_equal")
    __gt__, __ge__ = binary("greater"), binary("greater_equal")

    def __eq__(self, other):
        """Compare by element; with None and other objects it is all False (__richcmp__)."""
        if other is None or type(other).__eq__ is object.__eq__:
            return UFUNCS["not_equal"](self, self) & False
        return binary("equal")(self, other)

    def __ne__(self, other):
        if other is None or type(other).__eq__ is object.__eq__:
            return UFUNCS["equal"](self, self) | True
        return binary("not_equal")(self, other)

    __hash__ = None

    def __pow__(self, other):
        """x ** 2 is a square, and so on (core.pyx:__pow__, since CuPy 14)."""
        name = FAST_POWERS.get((type(other), other)) if isinstance(other, int | float) else None
        if name is None:
            return binary("power")(self, other)
        whole = type(other) is float and self.dtype.kind not in "fc"
        return UFUNCS[name](self, dtype=np.result_type(self.dtype, other) if whole else None)

    def __matmul__(self, other):
        if isinstance(other, Storage):
            from ._matmul import matmul

            return matmul(self, other)
        return NotImplemented if defers_to(self, other) else np.matmul(self, other)

    def __rmatmul__(self, other):
        return NotImplemented if defers_to(self, other) else np.matmul(other, self)
