"""What a device array is made of, and how kernels take and leave arrays (CuPy: _core/)."""

import numpy as np

from . import _counters
from .cuda import device
from .cuda.memory import Memory


def unavailable(where: int, here: int) -> str:
    return (
        f"The device where the array resides ({where}) is different from the current device "
        f"({here}). Peer access is unavailable between these devices."
    )


class Storage:
    """`_host`: the host array that plays the device array's part; `_memory`: its allocation.

    base  of a view: the array that it is a view of, which is none itself (core.pyx:_view)
    """

    __slots__ = ("__weakref__", "_host", "_memory", "base")

    def _view(self, host: np.ndarray) -> "Storage":
        view = wrap(host, self._memory)
        view.base = self if self.base is None else self.base
        return view


def wrap(host: np.ndarray, memory: Memory | None = None) -> Storage:
    """Return a cupy.ndarray around this host array; without `memory` it is a fresh one."""
    from . import ndarray

    result = ndarray.__new__(ndarray)
    result._host, result._memory = host, Memory._of(host) if memory is None else memory
    result.base = None
    return result


def operand(x, writes: bool = False):
    """Return what a kernel works on: an array of the current device, or a scalar.

    _kernel.pyx:_preprocess_arg, _check_peer_access: anything else is refused. The devices here
    have no access to each other's memory; where real ones do, CuPy only warns.
    """
    if isinstance(x, Storage):
        if x._memory.device_id != device.current():
            raise ValueError(unavailable(x._memory.device_id, device.current()))
        x._memory._use(x._host, writes)
        return x._host
    if isinstance(x, bool | int | float | complex | np.generic):
        return x
    raise TypeError(f"Unsupported type {type(x)}")  # _scalar.pyx:CScalar


def operands(*arrays) -> list[np.ndarray]:
    """Return the host arrays of device arrays; TypeError for anything else."""
    for x in arrays:
        if not isinstance(x, Storage):
            raise TypeError(f"expected cupy.ndarray, got {type(x)}")
    return [operand(x) for x in arrays]


def launch(host) -> Storage:
    """Return the C-contiguous result of one kernel."""
    host = np.array(host, order="C", copy=None)
    _counters.launched(host.size)
    return wrap(host)


def store(out: Storage, host, casting: str = "same_kind") -> Storage:
    """Write a kernel's result into `out` (_kernel.pyx:_get_out_args_from_optionals)."""
    if not isinstance(out, Storage):
        raise TypeError(f"Output arguments type must be cupy.ndarray, not {type(out)}")
    host, into = np.asarray(host), operand(out, writes=True)
    if into.shape != host.shape:
        raise ValueError(f"Out shape is mismatched: {into.shape} for {host.shape}")
    if not np.can_cast(host.dtype, into.dtype, casting):
        raise TypeError(f"output {host.dtype!r} could not be coerced to {into.dtype!r}")
    _counters.launched(host.size)
    with np.errstate(all="ignore"):
        into[...] = host
    return out
