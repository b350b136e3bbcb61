"""The calls of the CUDA runtime that minidist makes (CuPy: cupy_backends/cuda/api/runtime.pyx)."""

from . import allocations as _allocations
from . import device as _device

CUDA_R_32F, CUDA_R_64F, CUDA_R_16F = 0, 1, 2  # cuBLAS' names of dtypes


class CUDARuntimeError(RuntimeError):
    """A call of the runtime failed."""


def getDeviceCount() -> int:
    return _device.COUNT


def getDevice() -> int:
    return _device.current()


def deviceSynchronize() -> None:
    _device.Device().synchronize()


malloc, free = _allocations.malloc, _allocations.free
ipcGetMemHandle, ipcOpenMemHandle = _allocations.ipcGetMemHandle, _allocations.ipcOpenMemHandle
ipcCloseMemHandle = _allocations.ipcCloseMemHandle
deviceCanAccessPeer = _allocations.deviceCanAccessPeer
_deviceEnsurePeerAccess = _allocations._deviceEnsurePeerAccess
