"""A stand-in for CuPy on a machine without a GPU: it computes with NumPy, never fast.

It refuses what CuPy refuses (implicit copies, NumPy arrays among its own, another device's arrays),
returns what CuPy returns (arrays of no dimension, where NumPy has scalars), lacks what CuPy lacks,
and counts copies, waits and launches (`_counters.py`). Kernels run as g++ compiles them. It has
only the names that minidist uses. Every rule names the function of CuPy that it follows, in the
sources of version 14.2.
"""

# ruff: noqa: F401
from numpy import (
    bool_,
    float16,
    float32,
    float64,
    inf,
    int8,
    int16,
    int32,
    int64,
    nan,
    uint8,
    uint16,
    uint32,
    uint64,
)

from . import cuda
from ._array import ndarray
from ._creation import (
    arange,
    array,
    asarray,
    ascontiguousarray,
    asnumpy,
    empty,
    empty_like,
    full,
    full_like,
    get_array_module,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from ._functions import (
    append,
    argpartition,
    broadcast_to,
    concatenate,
    expand_dims,
    max,
    min,
    moveaxis,
    packbits,
    split,
    stack,
    sum,
    swapaxes,
    take,
    take_along_axis,
    unpackbits,
    where,
)
from ._kernels import ElementwiseKernel, ReductionKernel
from ._matmul import matmul
from ._ufunc import UFUNCS as _UFUNCS
from ._ufunc import ufunc
from .cuda.device import is_available

globals().update(_UFUNCS)
