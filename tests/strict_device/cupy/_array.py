"""The device array (CuPy: _core/core.pyx, _ndarray_base; functions are named without the file)."""

import numpy as np

from . import _counters
from ._indexing import Indexing
from ._operators import Operators
from ._reductions import Reductions
from ._storage import Storage, launch, operand, wrap
from .cuda.device import Device
from .cuda.memory import Memory, MemoryPointer
from .cuda.stream import get_current_stream


class ndarray(Operators, Indexing, Reductions, Storage):
    """An array on a device."""

    __slots__ = ()
    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        size = np.empty(0, dtype).itemsize * int(np.prod(shape))
        at = MemoryPointer(Memory(size), 0) if memptr is None else memptr
        raw = at.mem.buffer.reshape(-1).view(np.uint8)[at.offset :]
        self._host = np.ndarray(shape, dtype, raw, 0, strides, order)
        self._memory, self.base = at.mem, None

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    device = property(lambda self: Device(self._memory.device_id))
    T = property(lambda self: self._view(self._host.T))

    @shape.setter
    def shape(self, shape):
        self._host = self._host.view()
        self._host.shape = shape

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._memory, self._host.ctypes.data - self._memory.ptr)

    def __array__(self, dtype=None, copy=None):
        """Refuse (core.pyx:__array__)."""
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        """Answer NumPy's ufuncs with ours; they refuse NumPy's arrays (core.pyx)."""
        import cupy

        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        ours = getattr(cupy, ufunc.__name__, None)
        kinds = (ndarray, np.ndarray, np.generic, bool, int, float, complex)
        if ours is None or not all(isinstance(x, kinds) for x in inputs):
            return NotImplemented
        if ufunc.__name__ in (
            "equal",
            "not_equal",
            "less",
            "less_equal",
            "greater",
            "greater_equal",
        ):
            inputs = [x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs]
        return (ours if method == "__call__" else getattr(ours, method))(*inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        """Answer NumPy's functions with ours of the same name (core.pyx)."""
        import cupy

        ours = getattr(cupy, func.__name__, None)
        known = all(issubclass(t, ndarray | np.ndarray) for t in types)
        return ours(*args, **kwargs) if ours is not None and known else NotImplemented

    def get(self, stream=None, order="C", out=None, blocking=True):
        """Copy to the host, and wait for it (core.pyx:get)."""
        self._memory._use(self._host, False)
        if out is not None:
            if out.dtype != self.dtype or out.shape != self.shape:
                raise (TypeError if out.dtype != self.dtype else ValueError)("out does not fit")
            out[...] = self._host
        result = np.array(self._host, order=order) if out is None else out
        if result.strides != self.strides:
            _counters.launched(self.size)  # first it is made contiguous on the device
        if self.size:
            _counters.copied_to_host(self.nbytes)
            if blocking:
                get_current_stream().synchronize()
        return result

    def set(self, arr, stream=None):
        """Copy a host array of this dtype and shape here (core.pyx:set)."""
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype:
            raise TypeError(f"{getattr(arr, 'dtype', type(arr))} cannot be set to {self.dtype}")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        self._memory._use(self._host, True)
        self._host[...] = arr
        _counters.copied_to_device(arr.nbytes)

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def __reduce__(self):
        """Pickle as a host array, unpickle on the current device (core.pyx:__reduce__)."""
        from ._creation import array

        return array, (self.get(order="A"),)

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __repr__(self):
        return repr(self.get())

    def __str__(self):
        return str(self.get())

    def __bool__(self):
        """Copy one element to the host and wait for it (core.pyx:__nonzero__)."""
        if self.size != 1:
            raise ValueError("The truth value of an array without exactly one element is ambiguous")
        return bool(self.get())

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        """Give views, none of which is a scalar (core.pyx:__iter__)."""
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        """Cast; `casting` and `subok` are not supported (core.pyx:_astype)."""
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        host = operand(self)
        if not copy and host.dtype == dtype and host.astype(dtype, order, copy=False) is host:
            return self
        _counters.launched(self.size)
        with np.errstate(all="ignore"):
            return wrap(host.astype(dtype, order))

    def copy(self, order="C"):
        """Copy to the current device, from whichever this is on (core.pyx:copy)."""
        _counters.launched(self.size)
        self._memory._use(self._host, False)
        return wrap(self._host.copy(order))

    def fill(self, value):
        """Fill with one number, of the host or of this device (core.pyx:fill)."""
        if np.shape(value if not isinstance(value, ndarray) else operand(value)) != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        value = operand(value) if isinstance(value, ndarray) else np.asarray(value, self.dtype)
        operand(self, writes=True)[...] = value
        _counters.launched(self.size)

    def view(self, dtype=None, type=None):
        return self._view(self._host.view() if dtype is None else self._host.view(dtype))

    def reshape(self, *shape, order="C"):
        """Return a view where that is possible, else a copy (_routines_manipulation.pyx)."""
        host = self._host.reshape(*shape, order=order)
        if self.size == 0 or np.may_share_memory(host, self._host):
            return self._view(host)
        return launch(host)

    def ravel(self, order="C"):
        return self.reshape(-1, order=order)

    def flatten(self, order="C"):
        return self.reshape(-1, order=order).copy()

    def transpose(self, *axes):
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1, axis2):
        return self._view(self._host.swapaxes(axis1, axis2))
