"""Allocations of the CUDA runtime, and their use by other processes (CUDA Runtime API, 6.11).

What a process writes, other processes see when it has waited for its stream: until then the bytes
are kept here. That is the worst that CUDA allows.

A handle of 64 bytes names the process, and a nameless file of it: /proc/PID/fd/N. The first page of
the file lists the processes that have it open. What CUDA leaves undefined is an error: to free
memory that another process has open.
"""

import fcntl
import mmap
import os
import struct

import numpy as np

from . import device, order

PAGE = mmap.PAGESIZE
REFUSED = "STRICT_IPC_REFUSED"  # in the environment: no handle can be opened, as in some containers
NO_PEERS = "STRICT_NO_PEER_ACCESS"  # in the environment: "all", or "1>0": GPU 1 cannot see GPU 0's
LIVE: dict[int, "Allocation"] = {}  # by address
PEERS: set[tuple[int, int]] = set()  # (device, the one whose memory it may use)


class Allocation:
    """Memory from malloc, or of another process.

    buffer  what this process sees;  file  what all see, if it is shared
    dirty   [begin, end, stream, tick]: what this process has written, and others do not see yet
    """

    def __init__(self, size: int, number: int):
        self.buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.address = self.buffer.ctypes.data
        self.size, self.device, self.uses, self.dirty = size, number, order.Uses(), []
        self.file, self.opened, self.alive, self.descriptor = None, 0, True, None
        LIVE[self.address] = self

    def share(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.file = np.frombuffer(mmap.mmap(descriptor, PAGE + self.size), np.uint8)
        self.users = self.file[:PAGE].view(np.int64)

    def change_users(self, old: int, new: int) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.users[np.flatnonzero(self.users == old)[0]] = new
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def use(self, begin: int, end: int, stream: tuple, writes: bool) -> None:
        """Let a work of this stream use these bytes; what it reads is what all see."""
        from .runtime import CUDARuntimeError

        if not self.alive:
            raise CUDARuntimeError("cudaErrorIllegalAddress: the memory was freed, or closed")
        if device.current() != self.device and (device.current(), self.device) not in PEERS:
            raise CUDARuntimeError("cudaErrorIllegalAddress: it is on a GPU without peer access")
        tick = self.uses.add(begin, end, stream, writes)
        if self.file is not None:
            seen = self.file[PAGE + begin : PAGE + end].copy()
            for first, last, *_ in self.dirty:
                if first < end and begin < last:
                    low, high = max(first, begin), min(last, end)
                    seen[low - begin : high - begin] = self.buffer[low:high]
            self.buffer[begin:end] = seen
            if writes:
                self.dirty.append((begin, end, stream, tick))

    def end(self) -> None:
        del LIVE[self.address]
        self.alive = False


def flush(clock: dict) -> None:
    """Show other processes what works in this clock have written."""
    for allocation in [a for a in list(LIVE.values()) if a.dirty]:  # a copy in one go
        left = []
        for begin, end, stream, tick in allocation.dirty:
            if clock.get(stream, 0) < tick:
                left.append((begin, end, stream, tick))
            else:
                allocation.file[PAGE + begin : PAGE + end] = allocation.buffer[begin:end]
        allocation.dirty = left


def fail(name: str, text: str):
    from .runtime import CUDARuntimeError

    raise CUDARuntimeError(f"{name}: {text}")


def at(pointer: int) -> Allocation:
    """Return the allocation that a pointer is in."""
    for allocation in list(LIVE.values()):
        if allocation.address <= pointer < allocation.address + max(1, allocation.size):
            return allocation
    fail("cudaErrorInvalidValue", "invalid argument")


def made_at(pointer: int) -> Allocation:
    """Return the allocation that begins at a pointer."""
    return LIVE.get(pointer) or fail("cudaErrorInvalidValue", "invalid argument")


def malloc(size: int) -> int:
    return Allocation(size, device.current()).address


def free(ptr: int) -> None:
    """Free; it waits for the device (cudaFree)."""
    allocation = made_at(ptr)
    if allocation.opened:
        fail("cudaErrorInvalidValue", "free of memory that another process has made")
    if allocation.file is not None:
        users = [pid for pid in allocation.users.tolist() if pid and runs(pid)]
        if users:
            order.note(f"memory is freed that processes {users} have open")
        os.close(allocation.descriptor)
    allocation.end()


def runs(pid: int) -> bool:
    """Return whether a process lives; the driver closes what a dead one had open."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ipcGetMemHandle(devPtr: int) -> bytes:
    """Return a handle of the whole allocation that a pointer is in."""
    allocation = at(devPtr)
    if allocation.opened:
        fail("cudaErrorInvalidValue", "only who has made memory exports it")
    if allocation.file is None:
        descriptor = os.memfd_create("strict device")
        os.ftruncate(descriptor, PAGE + allocation.size)
        allocation.share(descriptor)
        if allocation.uses.uses:
            allocation.file[PAGE:] = allocation.buffer
    values = os.getpid(), allocation.descriptor, allocation.size, allocation.device
    return struct.pack("4q", *values).ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes) -> int:
    """Map another process's allocation; the same pointer if that was done already."""
    if len(handle) != 64:
        raise ValueError(f"a handle has 64 bytes, not {len(handle)}")
    pid, number, size, owner = struct.unpack("4q", handle[:32])
    if pid == os.getpid():
        fail("cudaErrorInvalidContext", "invalid device context: it is this process's own")
    if REFUSED in os.environ:
        fail("cudaErrorMapBufferObjectFailed", "mapping of buffer object failed")
    if owner != device.current() and not deviceCanAccessPeer(device.current(), owner):
        fail("cudaErrorPeerAccessUnsupported", "peer access is not supported between two devices")
    for allocation in list(LIVE.values()):
        if allocation.opened and allocation.handle == handle:
            allocation.opened += 1
            return allocation.address
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError:
        fail("cudaErrorInvalidResourceHandle", "invalid resource handle")
    allocation = Allocation(size, device.current())
    allocation.share(descriptor)
    allocation.opened, allocation.handle = 1, handle
    allocation.change_users(0, os.getpid())
    return allocation.address


def ipcCloseMemHandle(devPtr: int) -> None:
    """Undo one opening; after the last one the memory is gone."""
    allocation = made_at(devPtr)
    if not allocation.opened:
        fail("cudaErrorInvalidValue", "this memory was not opened")
    allocation.opened -= 1
    if not allocation.opened:
        if allocation.dirty:
            order.note("memory is closed while a stream still writes it")
        allocation.change_users(os.getpid(), 0)
        os.close(allocation.descriptor)
        allocation.end()


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    lacks = os.environ.get(NO_PEERS)
    return int(device != peerDevice and lacks not in ("all", f"{device}>{peerDevice}"))


def _deviceEnsurePeerAccess(peerDevice: int) -> None:
    if not deviceCanAccessPeer(device.current(), peerDevice):
        fail("cudaErrorPeerAccessUnsupported", "peer access is not supported between two devices")
    PEERS.add((device.current(), peerDevice))
