"""Indices of device arrays (CuPy: _core/_routines_indexing.pyx; functions are named without it).

Numbers and slices give views. Arrays of indices may be the host's, which is a copy up; one that is
out of range wraps around silently. A mask makes the host wait for its number of elements.
"""

import numpy as np

from . import _counters
from ._storage import Storage, launch, operand, store

ADDS = "int32 float16 float32 float64 uint32 uint64".split()  # and int64 since CuPy 14


def parts_of(slices, x: np.ndarray) -> tuple[tuple, bool]:
    """Return the host's indices, wrapped around, and whether any is an array (_prepare_slice_list).

    The index of an axis is taken modulo its length (_take_kernel_core, _create_scatter_kernel).
    """
    given = list(slices) if isinstance(slices, tuple) else [slices]
    parts = [s if basic(s) else operand(on_device(s)) for s in given]
    axes = [0 if s is None or s is Ellipsis else axes_of(s) for s in parts]
    axis, result = 0, []
    for part, count in zip(parts, axes, strict=True):
        if isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.size:
            part = part.astype(np.intp) % x.shape[axis]
        result.append(part)
        axis += x.ndim - sum(axes) if part is Ellipsis else count
    return tuple(result), any(isinstance(part, np.ndarray) for part in parts)


def basic(s) -> bool:
    scalar = np.isscalar(s) and not isinstance(s, bool | np.bool_)
    return s is None or s is Ellipsis or isinstance(s, slice) or scalar


def on_device(s):
    """Copy a list or a host array of indices up; an empty list has integers."""
    if isinstance(s, Storage):
        return s
    from ._creation import array

    return array(s, np.int32 if np.size(s) == 0 else None)


def axes_of(part) -> int:
    if isinstance(part, np.ndarray):
        if part.dtype.kind not in "biu":
            raise IndexError("arrays used as indices must be of integer or boolean type")
        return part.ndim if part.dtype.kind == "b" else 1
    return 1


def wait_for_mask(parts) -> None:
    """A mask is scanned, and its number of elements read (_prepare_mask_indexing_single)."""
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype.kind == "b" and part.size:
            _counters.launched()
            _counters.copied_to_host(4)
            _counters.waited()


class Indexing(Storage):
    __slots__ = ()

    def __getitem__(self, slices):
        """Return a view, of no dimension too, or a copy if an index is an array."""
        parts, advanced = parts_of(slices, self._host)
        if not advanced:
            whole = parts if any(p is Ellipsis for p in parts) else (*parts, Ellipsis)
            return self._view(self._host[whole])
        wait_for_mask(parts)
        return launch(operand(self)[parts])

    def __setitem__(self, slices, value):
        """Copy a device array of any dtype or fill with a scalar (_scatter_op); cast freely.

        A host array is refused, unless an index is an array: then `value` is copied up.
        """
        parts, advanced = parts_of(slices, self._host)
        if not advanced:
            return self._assign(self[slices], value)
        x = operand(self, writes=True)
        wait_for_mask(parts)
        value = value if isinstance(value, Storage) else upload(value, self.dtype)
        refuse_repeats(x, parts)
        with np.errstate(all="ignore"):
            x[parts] = operand(value)
        _counters.launched(value.size)

    @staticmethod
    def _assign(place, value):
        if not isinstance(value, Storage):
            return place.fill(value)
        same = place.shape == value.shape and place.strides == value.strides
        if same and place.dtype == value.dtype and place.flags.c_contiguous:
            place._memory._use(place._host, True)
            value._memory._use(value._host, False)
            place._host[...] = value._host  # a copy of memory, between devices too
        else:
            into, host = operand(place, writes=True), operand(value)
            with np.errstate(all="ignore"):
                into[...] = host.reshape(host.shape[max(0, host.ndim - into.ndim) :])
        _counters.launched(place.size)

    def _scatter_add(self, indices, value):
        """Add at places that may repeat, with atomics (_scatter_op_single)."""
        x = operand(self, writes=True)
        parts, advanced = parts_of(indices, x)
        if advanced and self.dtype.name not in ADDS:
            raise TypeError(f"cupy.add.at only supports {', '.join(ADDS)} as data type")
        if advanced and not isinstance(value, Storage):
            value = upload(value, self.dtype)
        wait_for_mask(parts)
        np.add.at(x, parts, np.asarray(operand(value)).astype(x.dtype))
        _counters.launched(x.size)

    def take(self, indices, axis=None, out=None):
        """Gather along an axis; out of range wraps around (_take)."""
        x = operand(self)
        if not isinstance(indices, Storage):
            indices = indices if np.isscalar(indices) else upload(indices, np.int64)
        places = np.asarray(operand(indices))
        count = x.size if axis is None else x.shape[axis]
        if count == 0 and places.size:
            raise IndexError("cannot do a non-empty take from an empty axes.")
        host = x.take(places.astype(np.intp) % max(count, 1), axis)
        return launch(host) if out is None else store(out, host)


def upload(value, dtype):
    from ._creation import array

    return array(value, dtype)


def refuse_repeats(x: np.ndarray, parts) -> None:
    """CuPy leaves undefined which of two values for one place wins: here it is an error."""
    places = np.arange(x.size).reshape(x.shape)[parts]
    if np.unique(places).size != places.size:
        raise RuntimeError("two values for one place: on a GPU either may win")
