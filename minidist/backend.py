"""Arrays on the host (NumPy) or on a GPU (CuPy): one source for both.

Inside a function, `xp = array_module(x)` gives the module of the data. There is no switch to set:
arrays of both kinds can coexist in one process. Only this file imports CuPy.
"""

import ctypes
import functools
import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
DEVICES = ("cpu", "gpu")


def array_module(*arrays: Array) -> ModuleType:
    """Return cupy if any argument is on a GPU, else numpy (always, before CuPy is imported)."""
    cupy = sys.modules.get("cupy")
    return cupy.get_array_module(*arrays) if cupy else np


def as_array(x) -> Array:
    """Return x itself if it is a NumPy or CuPy array, else `np.asarray(x)`."""
    return x if isinstance(x, np.ndarray) or on_gpu(x) else np.asarray(x)


def to_host(x) -> np.ndarray:
    """Return x as a NumPy array; a copy only if x lives on a GPU."""
    return array_module(x).asnumpy(x) if on_gpu(x) else np.asarray(x)


def device_module(device: str) -> ModuleType:
    """Return numpy for "cpu", cupy for "gpu"; ValueError where there is none."""
    check_device(device)
    if device == "cpu":
        return np
    import cupy

    return cupy


def to_device(x, device: str) -> Array:
    """Return x as an array on `device`, "cpu" or "gpu"; a copy only if it has to move."""
    return to_host(x) if device == "cpu" else device_module(device).asarray(x)


def beside(x, other: Array) -> Array:
    """Return x as an array on the device of `other`; a copy only if it has to move."""
    return to_device(x, "gpu" if on_gpu(other) else "cpu")


def on_gpu(x) -> bool:
    return not isinstance(x, np.ndarray) and array_module(x) is not np


@functools.cache
def why_no_gpu() -> str | None:
    """Return None if CuPy finds a GPU, else the reason and the remedy in one sentence."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'minidist[gpu]'"
    import cupy

    if not cupy.is_available():
        return "CuPy is installed but finds no usable GPU: check the driver with nvidia-smi"
    return None


def check_device(device: str) -> None:
    """Raise ValueError unless `device` is "cpu", or "gpu" on a machine that has one."""
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; choose one of {', '.join(DEVICES)}")
    if device == "gpu" and (reason := why_no_gpu()):
        raise ValueError(f"device 'gpu' is not available here. {reason}, or use device 'cpu'")


def elements(shape) -> int:
    """Return how many elements an array of this shape, an int or a tuple, has."""
    sides = np.atleast_1d(shape).tolist()
    if any(side < 0 for side in sides):
        raise ValueError(f"a shape has no negative sides, but {shape} has")
    return math.prod(sides)


def empty(shape, dtype) -> np.ndarray:
    """Return an uninitialised host array on a 64-byte boundary: one cache line.

    64 bytes is also the widest SIMD register; NumPy aligns to 16 bytes only.
    """
    dtype = np.dtype(dtype)
    nbytes = elements(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def widen(x: Array) -> Array:
    """Return float16 as float32, anything else unchanged: half precision is for storage only."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def sum_over(x: Array, axis: int | tuple | None = None, keepdims: bool = False) -> Array:
    """x.sum(axis), in float32 and rounded once for float16, in which 2048 + 1 is 2048."""
    half = x.dtype == np.float16
    y = x.sum(axis=axis, keepdims=keepdims, dtype=np.float32 if half else None)
    return y.astype(np.float16) if half else y


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b, in float32 and rounded once for float16, as GPUs do (NumPy has no BLAS for it)."""
    if a.dtype != np.float16 or on_gpu(a):
        return array_module(a).matmul(a, b, out=out)
    product = np.matmul(widen(a), widen(b)).astype(np.float16)
    return into(out, product)


def into(out: Array | None, value: Array) -> Array:
    """Write value into `out` and return that; return value itself if `out` is None."""
    if out is None:
        return value
    out[...] = value
    return out


def erf(x: Array) -> Array:
    """The error function, by element; on the host through `math.erf`, 0.1 us per element."""
    if on_gpu(x):
        from cupyx.scipy.special import erf as gpu_erf

        return gpu_erf(x)
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), x.dtype)


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for reuse instead of returning them to the kernel.

    Every training step allocates and frees the same megabytes. By default glibc returns blocks
    above 128 KiB to the kernel, and every page faults in again. A thread's blocks come from an
    arena of its own, whose empty heaps glibc always returns. So the threads that start after this
    call share the first arena. Without glibc this does nothing; results are the same either way.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
            mallopt(m_arena_max, 1)
            mallopt(m_mmap_threshold, 1 << 30)
            mallopt(m_trim_threshold, 1 << 30)
