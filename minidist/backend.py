"""Arrays on the host (NumPy) or on a GPU (CuPy): one source for both; and what their numbers are.

Inside a function, `xp = array_module(x)` gives the module of the data. There is no switch to set:
arrays of both kinds can coexist in one process. Only this file imports CuPy.

Half precision, float16 or bfloat16, is for storage only: sums are in float32, and rounded once.
What is rounded to a format (`rounded`) stays in a wider array, so that NumPy needs no dtype for it:

    format     significant bits   smallest   largest
    bfloat16   8                  2^-133     3.4e38
    float16    11                 2^-24      65504
    e4m3       4                  2^-9       448        Micikevicius et al., FP8 Formats for Deep
    e5m2       3                  2^-16      57344      Learning (2022), table 1

From 2^(bits - 1) smallest on, a number has all its bits; below, the numbers of a format have equal
distances. The results are those of ml_dtypes, bit for bit, up to the largest number.
"""

import ctypes
import functools
import importlib.util
import math
import sys
import time
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from minidist.errors import WrongInput
from minidist.events import Clock

DEVICES = ("cpu", "gpu", "gpu:N")
Array = Any  # numpy.ndarray or cupy.ndarray


def array_module(*arrays: Array) -> ModuleType:
    """Return cupy if any argument is on a GPU, else numpy (always, before CuPy is imported)."""
    return sys.modules["cupy"] if "cupy" in sys.modules and any(map(on_gpu, arrays)) else np


def on_gpu(x) -> bool:
    """Return whether x is a CuPy array. (While another thread imports CuPy it may lack ndarray.)"""
    if isinstance(x, np.ndarray):
        return False
    return isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ()))


def as_array(x) -> Array:
    """Return x itself if it is a NumPy or CuPy array, else `np.asarray(x)`."""
    return x if type(x) is ndarray or isinstance(x, ndarray) or on_gpu(x) else np.asarray(x)


def to_host(x) -> np.ndarray:
    """Return x as a NumPy array; a copy only if x lives on a GPU."""
    return array_module(x).asnumpy(x) if on_gpu(x) else np.asarray(x)


def host_copy(x: Array) -> np.ndarray:
    """Return x as a NumPy array of its own: one copy, wherever x is."""
    return to_host(x) if on_gpu(x) else x.copy()


def to_device(x, device: str) -> Array:
    """Return x as an array on `device`; a copy only if it has to move.

    device  "cpu"; "gpu:N"; or "gpu", the GPU that this thread uses: see `use_device`
    """
    if device == "cpu":
        return to_host(x)
    cupy = device_module(device)
    with nullcontext() if device == "gpu" else cupy.cuda.Device(device_number(device)):
        return _on_current_gpu(x, cupy)


def on_device_of(x, other: Array) -> Array:
    """Return x as an array on the device of `other`; a copy only if it has to move."""
    if not on_gpu(other):
        return to_host(x)
    with other.device:
        return _on_current_gpu(x, array_module(other))


def _on_current_gpu(x, cupy: ModuleType) -> Array:
    """Return x as an array on this thread's GPU; wait for both GPUs if it is on another one.

    Nothing else orders the work of two GPUs. CuPy copies only contiguous arrays between them.
    """
    if not on_gpu(x) or x.device == cupy.cuda.Device():
        return cupy.asarray(x)
    with x.device:
        whole = cupy.ascontiguousarray(x)
        synchronize(whole)
    copy = cupy.asarray(whole)
    synchronize(copy)
    return copy


def device_module(device: str) -> ModuleType:
    """Return numpy for "cpu", cupy for a GPU; ValueError where there is none."""
    check_device(device)
    if device == "cpu":
        return np
    import cupy

    return cupy


def check_device(device: str) -> None:
    """Raise ValueError unless `device` is "cpu", or "gpu" or "gpu:N" on a machine that has it."""
    if device == "cpu":
        return
    kind, colon, number = device.partition(":")
    if kind != "gpu" or (colon and not (number.isascii() and number.isdigit())):
        raise WrongInput(f"unknown device {device!r}; choose one of {', '.join(DEVICES)}")
    if reason := why_no_gpu():
        raise WrongInput(f"device {device!r} is not available here. {reason}, or use device 'cpu'")
    if colon and int(number) >= (count := gpus()):
        there = "is one GPU, gpu:0" if count == 1 else f"are {count}, gpu:0 to gpu:{count - 1}"
        raise WrongInput(f"device {device!r} does not exist: there {there}")


def device_number(device: str, rank: int = 0) -> int:
    """Return which GPU a rank uses: N for "gpu:N"; for "gpu" the ranks take turns."""
    check_device(device)
    return int(device.partition(":")[2] or rank % gpus())


def use_device(device: str, rank: int = 0) -> None:
    """Let this thread use the rank's GPU. Every thread of a rank calls this before anything else.

    CuPy has a current GPU per thread; a thread that does not call this uses number 0.
    """
    if device != "cpu":
        device_module(device).cuda.Device(device_number(device, rank)).use()


def gpus() -> int:
    """Return the number of GPUs of this machine."""
    return 0 if why_no_gpu() else device_module("gpu").cuda.runtime.getDeviceCount()


def synchronize(x: Array) -> None:
    """Return when this thread's work on an array is done: on a GPU, all work of its stream."""
    if on_gpu(x):
        array_module(x).cuda.get_current_stream().synchronize()


@functools.cache
def why_no_gpu() -> str | None:
    """Return None if CuPy finds a GPU, else the reason and the remedy in one sentence."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'minidist[gpu]'"
    try:
        import cupy

        found = cupy.is_available()
    except ImportError as error:
        return f"CuPy is installed but cannot be imported ({error}): install it anew"
    except RuntimeError:  # CuPy 13 raises where there is no driver; CuPy 14 returns False
        found = False
    if not found:
        return "CuPy is installed but finds no usable GPU: check the driver with nvidia-smi"
    return None


class DeviceClock(Clock):
    """The times at which the GPU of its maker's thread gets to a moment in its queue of work.

    A moment is a CUDA event. To record one makes neither the host nor the GPU wait. Seconds are
    those of the machine's monotonic clock. CUDA gives elapsed times as float32 milliseconds: exact
    to 0.5 us in the first seconds, to 0.25 ms after an hour.
    """

    def __init__(self, device: str = "gpu"):
        self.cuda = device_module(device).cuda
        self.gpu = self.cuda.Device()  # there is no time between events of two GPUs
        self.first = self.now()
        self.first.synchronize()
        self.start = time.monotonic()

    def now(self) -> Any:
        with self.gpu:  # a thread that the worker has started may use another one
            moment = self.cuda.Event()
            moment.record()  # in the current stream
        return moment

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self.start + self.cuda.get_elapsed_time(self.first, moment) / 1e3


def clock(device: str) -> Clock:
    """Return the clock by which work on a device is timed; call this on a thread that uses it."""
    return Clock() if device == "cpu" else DeviceClock(device)


def elements(shape) -> int:
    """Return how many elements an array of this shape, an int or a tuple, has."""
    sides = np.atleast_1d(shape).tolist()
    if any(side < 0 for side in sides):
        raise WrongInput(f"a shape has no negative sides, but {shape} has")
    return math.prod(sides)


def is_array(x) -> bool:
    """Return whether x is a NumPy or CuPy array."""
    return isinstance(x, np.ndarray) or on_gpu(x)


def same_device(x: Array, other: Array) -> bool:
    """Return whether both arrays are on the host, or both on one GPU."""
    return on_gpu(x) == on_gpu(other) and (not on_gpu(x) or x.device == other.device)


def address(x: Array) -> int:
    """Return where an array begins, in bytes; only of use among arrays of one device."""
    return x.data.ptr if on_gpu(x) else x.ctypes.data


def empty_on_device_of(other: Array, shape, dtype) -> Array:
    """Return an uninitialised array on the device of `other`."""
    if not on_gpu(other):
        return empty(shape, dtype)
    with other.device:
        return array_module(other).empty(shape, dtype)


def empty(shape, dtype) -> np.ndarray:
    """Return an uninitialised host array on a 64-byte boundary: one cache line.

    64 bytes is also the widest SIMD register; NumPy aligns to 16 bytes only.
    """
    dtype = np.dtype(dtype)
    nbytes = elements(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def sum_over(
    x: Array, axis: int | tuple | None = None, keepdims: bool = False, out: Array | None = None
) -> Array:
    """x.sum(axis), in float32 and rounded once for float16, in which 2048 + 1 is 2048."""
    if not is_half(x.dtype):
        return x.sum(axis=axis, keepdims=keepdims, out=out)
    return into(out, x.sum(axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype))


def mean_over(x: Array, axis: int | tuple | None = None, keepdims: bool = False) -> Array:
    """x.mean(axis), in float32 and rounded once for half precision."""
    if not is_half(x.dtype):
        return as_array(x.mean(axis=axis, keepdims=keepdims))
    return as_array(x.mean(axis=axis, keepdims=keepdims, dtype=np.float32)).astype(x.dtype)


def add_at(out: Array, index, x: Array) -> None:
    """out[index] += x where repeats add up, in float32 and rounded once for half precision."""
    total = widen(out)
    array_module(x).add.at(total, index, widen(x))
    if total is not out:
        out[...] = total


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b, in float32 and rounded once for float16, as GPUs do (NumPy has no BLAS for it)."""
    if not is_half(a.dtype) or on_gpu(a):
        return array_module(a).matmul(a, b, out=out)
    product = np.matmul(widen(a), widen(b)).astype(a.dtype)
    return into(out, product)


def into(out: Array | None, value: Array) -> Array:
    """Write value into `out` and return that; return value itself if `out` is None."""
    if out is None:
        return value
    out[...] = value
    return out


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, by element, through `math.erf`: 0.1 us per element."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), x.dtype)


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for reuse instead of returning them to the kernel.

    A rank calls it when it starts, a script with its first optimizer. Every training step allocates
    and frees the same megabytes. By default glibc returns blocks above 128 KiB to the kernel, and
    every page faults in again. A thread's blocks come from an arena of its own, whose empty heaps
    glibc always returns: threads that start after this call share the first arena.
    """
    if sys.platform == "linux":
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            mallopt(-8, 1)  # M_ARENA_MAX
            mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


# Which numbers are taken, and to which they are rounded.


def is_half(dtype: np.dtype) -> bool:
    """Return whether it is float16, or bfloat16 of ml_dtypes, whose kind NumPy calls "V"."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or is_half(dtype)


def float_dtype(name) -> np.dtype:
    """Return a float dtype; ValueError for another one, or for bfloat16 without ml_dtypes."""
    if name == "bfloat16":
        if importlib.util.find_spec("ml_dtypes") is None:
            raise WrongInput("bfloat16 needs ml_dtypes: pip install 'minidist[bfloat16]'")
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        dtype = np.dtype(name)
    except TypeError:  # no type at all
        dtype = np.dtype(object)
    if not is_float(dtype):
        raise WrongInput(f"parameters are floats, such as float32, not {name}")
    return dtype


def widen(x: Array) -> Array:
    """Return half precision, which is for storage only, as float32, and other floats unchanged.

    ValueError for whole numbers: what follows is computed in floats, and rounded to x's dtype.
    """
    if is_half(x.dtype):
        return x.astype(np.float32)
    if x.dtype.kind != "f":
        raise WrongInput(f"this is computed in floats, not in {x.dtype}; use .astype")
    return x


def whole_numbers(x, what: str) -> Array:
    """Return x, of any of NumPy's integer types, as int64; ValueError for bool, floats, others."""
    x = x.data if hasattr(x, "requires_grad") else x  # a tensor
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if x.size and x.dtype.kind not in "iu":
        raise WrongInput(f"{what} must be integers, not {x.dtype}")
    if x.dtype.kind == "u" and x.dtype.itemsize == 8:
        x = x - (x >> 63)  # the largest one becomes -2, not -1: that is IGNORED
    return x.astype(np.int64, copy=False)


class Format(NamedTuple):
    """Significant bits, and the smallest and the largest positive number."""

    bits: int
    smallest: float
    largest: float


BFLOAT16 = Format(8, 2.0**-133, (2 - 2.0**-7) * 2.0**127)
FLOAT16 = Format(11, 2.0**-24, 65504.0)
E4M3 = Format(4, 2.0**-9, 448.0)
E5M2 = Format(3, 2.0**-16, 57344.0)
EXPONENTS = {"float32": (np.uint32, 0x7F800000), "float64": (np.uint64, 0x7FF << 52)}  # their bits
HALF = {"bfloat16": BFLOAT16, "float16": FLOAT16}  # those that have a dtype, by its name


def rounded(x: Array, form: Format, draws: Array | None = None) -> Array:
    """Return X, float32 or float64, in the numbers of a format.

    A finite number beyond the largest becomes the largest; what is not finite stays as it is.

    draws  None: to the nearest number, of two equally near ones to the even one. Or uniform in
           [0, 1), one for each element: up if the draw is below the fraction that rounding down
           would lose, so that the mean over the draws is X (Connolly, Higham and Mary 2021)
    """
    xp, (whole, exponent) = array_module(x), EXPONENTS[x.dtype.name]
    fits = xp.maximum(xp.minimum(x, form.largest), -form.largest)
    power = (fits.view(whole) & whole(exponent)).view(x.dtype)  # the largest 2^i up to |x|, or 0
    spacing = xp.maximum(power * 2.0 ** (1 - form.bits), form.smallest)
    steps = fits / spacing  # exact: the spacing is a power of two
    if draws is None:
        steps = xp.rint(steps)
    else:
        down = steps // 1
        steps = down + (steps > down + draws)
    return xp.where(xp.isfinite(x), steps * spacing, x)
