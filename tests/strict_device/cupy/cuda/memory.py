"""Device memory is host memory with a device's number (CuPy: cuda/memory.pyx)."""

import numpy as np

from . import device


class Memory:
    """An allocation on the current device.  buffer: the host array that plays its part."""

    def __init__(self, size: int):
        self.buffer = np.full(size, 0xFF, np.uint8)  # nan in every floating dtype
        self.device_id = device.current()

    @classmethod
    def of(cls, host: np.ndarray) -> "Memory":
        """Return the current device's memory that holds this fresh array."""
        result = cls.__new__(cls)
        result.buffer, result.device_id = host, device.current()
        return result

    @property
    def ptr(self) -> int:
        return self.buffer.ctypes.data

    @property
    def size(self) -> int:
        return self.buffer.nbytes


class MemoryPointer:
    """`offset` bytes into an allocation."""

    def __init__(self, mem, offset: int):
        self.mem, self.offset, self.device_id = mem, offset, mem.device_id

    @property
    def ptr(self) -> int:
        return self.mem.ptr + self.offset

    @property
    def device(self) -> device.Device:
        return device.Device(self.device_id)

    def __add__(self, offset: int) -> "MemoryPointer":
        return MemoryPointer(self.mem, self.offset + offset)
