"""Free functions on device arrays; host arrays are refused unless a rule says otherwise."""

import numpy as np

from . import _counters
from ._creation import array
from ._storage import Storage, launch, operand, operands, store


def broadcast_to(array, shape):
    (host,) = operands(array)
    return array._view(np.broadcast_to(host, shape))


def expand_dims(a, axis):
    return a._view(np.expand_dims(operands(a)[0], axis))


def moveaxis(a, source, destination):
    return a._view(np.moveaxis(operands(a)[0], source, destination))


def swapaxes(a, axis1, axis2):
    operands(a)
    return a.swapaxes(axis1, axis2)


def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    """Copy every array into its place, one launch each (_routines_manipulation.pyx)."""
    hosts = operands(*tup)
    if not all(x.ndim for x in hosts):
        raise TypeError("zero-dimensional arrays cannot be concatenated")
    host = np.concatenate(hosts, axis, dtype=dtype, casting=casting)
    for x in hosts[1:] if len(hosts) <= 8 else ():  # more of one dtype are one kernel
        _counters.launched(x.size)
    return launch(host) if out is None else store(out, host)


def stack(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    parts = [expand_dims(x, axis) for x in tup]
    return concatenate(parts, axis, out, dtype=dtype, casting=casting)


def append(arr, values, axis=None):
    """Join; what is no device array is copied up first (_manipulation/join.py:append)."""
    arr, values = (x if isinstance(x, Storage) else array(x) for x in (arr, values))
    if axis is None:
        arr, values, axis = arr.ravel(), values.ravel(), 0
    return concatenate((arr, values), axis)


def split(ary, indices_or_sections, axis=0):
    """Return views; the places are numbers of the host (_manipulation/split.py)."""
    (host,) = operands(ary)
    return [ary._view(part) for part in np.split(host, indices_or_sections, axis)]


def take(a, indices, axis=None, out=None):
    operands(a)
    return a.take(indices, axis, out)


def take_along_axis(a, indices, axis):
    """Index by arrays, the others' by `arange` (_indexing/indexing.py:take_along_axis)."""
    x, places = operands(a, indices if isinstance(indices, Storage) else array(indices))
    if places.dtype.kind not in "iu":
        raise IndexError("`indices` must be an integer array")
    for length in x.shape[1:]:
        _counters.launched(length)
    return launch(np.take_along_axis(x, places % x.shape[axis], axis))


def where(condition, x=None, y=None):
    """Choose by element; numbers may be Python's (_sorting/search.py:where)."""
    if x is None or y is None:
        raise ValueError("Must provide both 'x' and 'y'")
    mask, *values = operands(condition)[0], operand(x), operand(y)
    dtype = np.result_type(*values)
    return launch(np.where(mask, *(np.asarray(v, dtype) for v in values)))


def sum(a, axis=None, dtype=None, out=None, keepdims=False):
    operands(a)
    return a.sum(axis, dtype, out, keepdims)


def max(a, axis=None, out=None, keepdims=False):
    operands(a)
    return a.max(axis, out, keepdims)


def min(a, axis=None, out=None, keepdims=False):
    operands(a)
    return a.min(axis, out, keepdims)


def argpartition(a, kth, axis=-1):
    """Sort it all (_core/_routines_sorting.pyx:_ndarray_argpartition)."""
    operands(a)
    return a.argsort(axis)


def packbits(a, axis=None, bitorder="big"):
    """Pack booleans or integers, flattened (_binary/packing.py:packbits)."""
    (host,) = operands(a)
    if host.dtype.kind not in "biu" or axis is not None:
        raise TypeError("Expected an input array of integer or boolean data type")
    return launch(np.packbits(host, bitorder=bitorder))


def unpackbits(a, axis=None, bitorder="big"):
    (host,) = operands(a)
    if host.dtype != np.uint8 or axis is not None:
        raise TypeError("Expected an input array of unsigned byte data type")
    return launch(np.unpackbits(host, bitorder=bitorder))
