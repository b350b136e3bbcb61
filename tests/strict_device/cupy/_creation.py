"""New arrays, and copies to and from the host (CuPy: _creation/, _core/core.pyx:array)."""

import numpy as np

from . import _counters
from ._array import ndarray
from ._storage import launch, operands, wrap
from .cuda import device


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """Copy an array, a scalar or a nested sequence to the current device (core.pyx:array)."""
    if isinstance(obj, ndarray):
        moved = obj if obj.device.id == device.current() else obj.copy()
        return moved.astype(obj.dtype if dtype is None else dtype, copy=copy and moved is obj)
    if isinstance(obj, list | tuple) and any(isinstance(x, ndarray) for x in obj):
        return _joined(obj, dtype)
    fortran = isinstance(obj, np.ndarray) and obj.flags.fnc  # see core.pyx:_array_default
    host = np.array(obj, dtype, order="F" if fortran else "C", ndmin=ndmin)
    if host.dtype.kind not in "?biufc":
        raise ValueError(f"Unsupported dtype {host.dtype}")  # _dtype.pyx:check_supported_dtype
    _counters.copied_to_device(host.nbytes)
    return wrap(host)


def _joined(parts, dtype):
    """Stack device arrays, not mixed with others (core.pyx:_array_from_nested_cupy_sequence)."""
    return launch(np.stack(operands(*parts), dtype=dtype))


def asarray(a, dtype=None, order=None, *, blocking=False):
    return array(a, dtype, copy=False)


def ascontiguousarray(a, dtype=None):
    if not isinstance(a, ndarray):
        raise TypeError(f"expected cupy.ndarray, got {type(a)}")  # its Cython signature
    same = dtype is None or a.dtype == dtype
    if same and a.flags.c_contiguous and a.ndim > 0:
        return a
    return a.astype(a.dtype if dtype is None else dtype, order="C").reshape(a.shape or 1)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """Return a host copy (cupy/__init__.py:asnumpy); a host array itself."""
    return a.get(out=out) if isinstance(a, ndarray) else np.asarray(a)


def get_array_module(*args):
    import cupy

    return cupy if any(isinstance(a, ndarray) for a in args) else np


def empty(shape, dtype=float, order="C"):
    """Return memory that nobody has written: here nan, and 0xFF bytes in integers."""
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    if dtype is None:
        dtype = getattr(fill_value, "dtype", None) or np.array(fill_value).dtype
    result = ndarray(shape, dtype)
    result.fill(fill_value)
    return result


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    """Make an array like another one, which may be the host's, on the current device.

    With its strides, if it has as many dimensions (_creation/basic.py:_new_like_order_and_strides);
    a shape of () is taken for none.
    """
    like = prototype._host if isinstance(prototype, ndarray) else prototype
    strides = np.empty_like(like, dtype, shape=shape or like.shape).strides
    return ndarray(shape or like.shape, dtype or like.dtype, strides=strides)


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    result = empty_like(a, dtype, shape=shape)
    result.fill(fill_value)
    return result


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    return full_like(a, 0, dtype, shape=shape)


def ones_like(a, dtype=None, order="K", subok=None, shape=None):
    return full_like(a, 1, dtype, shape=shape)


def arange(start, stop=None, step=1, dtype=None):
    """Count on the device (_creation/ranges.py:arange); the limits are host numbers."""
    if any(isinstance(x, ndarray) for x in (start, stop, step)):
        raise TypeError("arange takes numbers of the host")
    begin, end = (0, start) if stop is None else (start, stop)
    host = np.arange(begin, end, step, dtype)
    _counters.launched(host.size)
    return wrap(host)
