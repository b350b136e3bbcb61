"""What `a + b` and `a.sum()` apply: functions of operators.py, which has their adjoints."""

from types import ModuleType
from typing import Generic, TypeVar

from minidist.autograd import checks

Result = TypeVar("Result")  # Tensor, which this file does not import
Axis = int | tuple[int, ...] | None


class Operators(Generic[Result]):
    """The operators of a tensor, and its methods that compute.

    ops  the module operators.py; the package sets it, because operators.py imports tensor.py
    """

    ops: ModuleType
    __hash__ = object.__hash__  # a tensor may be a key: it is equal to itself alone
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = checks.no_comparison
    __eq__ = checks.only_itself
    __array__ = __array_function__ = checks.no_numpy
    __rpow__ = checks.no_exponent

    # fmt: off
    def __add__(self, other) -> Result: return self.ops.Add()(self, other)
    def __sub__(self, other) -> Result: return self.ops.Subtract()(self, other)
    def __mul__(self, other) -> Result: return self.ops.Multiply()(self, other)
    def __truediv__(self, other) -> Result: return self.ops.Divide()(self, other)
    def __pow__(self, exponent: float) -> Result: return self.ops.Power(exponent)(self)
    def __matmul__(self, other) -> Result: return self.ops.MatMul()(self, other)
    def __neg__(self) -> Result: return self.ops.Multiply()(self, -1)
    def __radd__(self, other) -> Result: return self.ops.Add()(other, self)
    def __rsub__(self, other) -> Result: return self.ops.Subtract()(other, self)
    def __rmul__(self, other) -> Result: return self.ops.Multiply()(other, self)
    def __rtruediv__(self, other) -> Result: return self.ops.Divide()(other, self)
    def __rmatmul__(self, other) -> Result: return self.ops.MatMul()(other, self)
    def __getitem__(self, index) -> Result: return self.ops.GetItem(index)(self)
    def exp(self) -> Result: return self.ops.Exp()(self)
    def log(self) -> Result: return self.ops.Log()(self)
    # fmt: on

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Result:
        return self.ops.Sum(axis, keepdims)(self)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Result:
        return self.ops.Mean(axis, keepdims)(self)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Result:
        return self.ops.Max(axis, keepdims)(self)

    def reshape(self, *shape: int | tuple[int, ...]) -> Result:
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.ops.Reshape(shape)(self)

    def transpose(self, *axes: int | tuple[int, ...]) -> Result:
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return self.ops.Transpose(axes)(self)

    T = property(transpose)
