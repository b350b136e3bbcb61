"""Device memory is host memory with a device's number (CuPy: cuda/memory.pyx)."""

import weakref

import numpy as np

from . import allocations, device, order
from .stream import key

LIVE: set[weakref.ref] = set()  # what holds memory: see `at`


class Memory:
    """An allocation on the current device.  buffer: the host array that plays its part.

    CuPy's pool gives it, when it is released, to the next array of the stream that it was made on.
    """

    def __init__(self, size: int):
        self._init(np.full(size, 0xFF, np.uint8))  # nan in every floating dtype

    @classmethod
    def _of(cls, host: np.ndarray) -> "Memory":
        """Return the current device's memory that holds this fresh array."""
        result = cls.__new__(cls)
        result._init(host)
        if order.active:
            result._use(host, True)
        return result

    def _init(self, buffer: np.ndarray) -> None:
        self.buffer, self.device_id = buffer, device.current()
        self.uses, self.stream = None, key() if order.active else (self.device_id, 0)
        LIVE.add(weakref.ref(self, LIVE.discard))

    def _use(self, host: np.ndarray, writes: bool) -> None:
        """Let a work of the current stream use the bytes of this array."""
        if order.active and host.size:
            with order.LOCK:
                order.raise_found()
                if self.uses is None:
                    self.uses = order.Uses()
                begin, end = bounds(host)
                here, stream = key()
                copied = stream == 0 and here != self.device_id
                if copied:
                    order.between(here, self.device_id)
                self.uses.add(begin, end, (here, stream), writes)
                if copied:
                    order.between(here, self.device_id)

    def __del__(self):
        if order is not None and self.uses is not None:
            with order.LOCK:
                self.uses.freed(self.stream)

    @property
    def ptr(self) -> int:
        return self.buffer.ctypes.data

    @property
    def size(self) -> int:
        return self.buffer.nbytes


class UnownedMemory:
    """Memory that CuPy does not release (memory.pyx:UnownedMemory): a part of an allocation.

    device_id  the device that uses it, not necessarily the one that has it
    """

    def __init__(self, ptr: int, size: int, owner, device_id: int = -1):
        self.allocation, self.owner = allocations.at(ptr), owner
        self.device_id = self.allocation.device if device_id < 0 else device_id
        self.start, self.ptr, self.size = ptr - self.allocation.address, ptr, size
        if self.start + size > self.allocation.size:
            raise ValueError(f"{size} bytes from {ptr} are more than was allocated")
        self.buffer = self.allocation.buffer[self.start : self.start + size]
        LIVE.add(weakref.ref(self, LIVE.discard))

    def _use(self, host: np.ndarray, writes: bool) -> None:
        if host.size:
            with order.LOCK:
                order.raise_found()
                begin, end = (place - self.allocation.address for place in bounds(host))
                self.allocation.use(begin, end, key(), writes)


def at(address: int, nbytes: int) -> Memory | UnownedMemory:
    """Return the current device's memory with these bytes; LookupError if no array has them."""
    for reference in list(LIVE):  # a copy in one go: other threads make and release arrays
        memory = reference()
        if memory is not None and memory.device_id == device.current():
            if memory.ptr <= address and address + nbytes <= memory.ptr + memory.size:
                return memory
    raise LookupError(f"no array of device {device.current()} has {nbytes} bytes from {address}")


def bounds(host: np.ndarray) -> tuple[int, int]:
    """Return the addresses of the first byte of an array, and of the first after it."""
    if host.flags.forc:
        begin = host.__array_interface__["data"][0]
        return begin, begin + host.nbytes
    return np.lib.array_utils.byte_bounds(host)


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
