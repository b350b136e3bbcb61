"""Memory on GPUs that all ranks of a machine see: the twin of shared memory, by CUDA IPC.

    rank 0   table in shared memory, and on its GPU: | chunk 0 | chunk 1 | ...
    rank 1   table in shared memory, and on its GPU: | chunk 0 | ...

A page of shared memory costs nothing until it is touched; on a GPU all memory is real. So a rank
allocates chunks as it needs them, and keeps them until it ends. Its table has a row for each: how
large it is, and its handle, by which another process opens it. A handle names a whole allocation of
the CUDA runtime, so no chunk is from CuPy's pool. A process cannot open its own handles: ranks that
are threads use the pointers.

Nothing orders the work of two processes on a GPU. So a rank that has used memory waits until its
GPU is done (`synchronize`), and then tells the others.

A place is one number of 64 bits, which means the same on all ranks. From the highest bit: DEVICE,
the rank, the chunk, the byte.

CUDA's Programming Guide, "Interprocess Communication"; CUDA Runtime API, cudaIpcOpenMemHandle.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.backend import Array, device_module, elements, on_gpu
from minidist.comm.local.shared_memory import SharedMemory, size_class
from minidist.errors import WrongInput

DEVICE = 1 << 63  # set in every place on a GPU; alone it means "no place", as NOWHERE on the host
RANK, CHUNK = 52, 40  # how many bits are below the rank, and below the chunk
GRAIN = 1 << 21  # bytes; a handle of a smaller allocation would share its neighbours' memory, too
USUAL = 1 << 26  # bytes of a chunk, unless one array needs more
LINE = 512  # bytes; every array begins at a multiple, as in CuPy's pool
PATIENCE = 5.0  # seconds; how long a rank that ends waits for the others to close its chunks

ROW = [("pid", "u8"), ("device", "u8"), ("pointer", "u8"), ("nbytes", "u8"), ("handle", "u1", 64)]
TABLE = np.dtype([("chunks", ROW, 1023), ("closed", "u8")])


class Owner:
    """Calls `end(*args)` when nothing refers to it any more, unless the process ends before."""

    def __init__(self, end: Callable, *args):
        weakref.finalize(self, end, *args).atexit = False


class DeviceMemory:
    """The chunks of all ranks. This rank allocates in its own.

    shared  memory of the host; every rank has its `table` there, at the same offset of its region
    export  whether the other ranks are processes, and need handles
    chunks  this rank's, in the order of its table
    opened  {(rank, number): chunk}, of those that this rank has mapped
    free    {(stream, bytes): parts to be used again}; another stream may still be using a part
    """

    device, nowhere, stage, piece = "gpu", DEVICE, 1 << 24, 1 << 62  # see SharedMemory

    def __init__(self, shared: SharedMemory, table: np.ndarray, export: bool):
        self.xp, self.rank, self.export = device_module("gpu"), shared.rank, export
        self.cuda, self.runtime = self.xp.cuda, self.xp.cuda.runtime
        self.number = self.runtime.getDevice()
        first = shared.offset_of(table) - shared.begin
        starts = range(first, len(shared.map), shared.region)
        self.tables = [shared.view(start, 1, TABLE)[0] for start in starts]
        self.chunks: list[Any] = []
        self.opened: dict[tuple[int, int], Any] = {}
        self.free: dict[tuple[int, int], list[tuple[Any, int]]] = {}
        self.newest, self.top = None, 0  # the chunk that has room, and its first unused byte
        self.lock = threading.Lock()

    # Allocating.

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype | type | str) -> Array:
        """Return an uninitialised array that all ranks can use; its place is reused."""
        dtype = np.dtype(dtype)
        nbytes = -(-size_class(elements(shape) * dtype.itemsize) // LINE) * LINE
        with self.lock:
            free = self.free.setdefault((self.cuda.get_current_stream().ptr, nbytes), [])
            chunk, start = free.pop() if free else self._place(nbytes)
        owner = Owner(free.append, (chunk, start))
        part = self.cuda.UnownedMemory(chunk.ptr + start, nbytes, owner, self.number)
        return self.xp.ndarray(shape, dtype, self.cuda.MemoryPointer(part, 0))

    def _place(self, nbytes: int) -> tuple:
        """Return (chunk, first byte) of a part that no array has used."""
        if nbytes > USUAL // 4:
            return self.grow(nbytes), 0
        if self.newest is None or self.top + nbytes > self.newest.size:
            self.newest, self.top = self.grow(USUAL), 0
        self.top += nbytes
        return self.newest, self.top - nbytes

    def grow(self, nbytes: int):
        """Return a new chunk of at least this size, which is in this rank's table from now on.

        MemoryError if the table is full.
        """
        nbytes = -(-nbytes // GRAIN) * GRAIN
        rows = self.tables[self.rank]["chunks"]
        if len(self.chunks) == len(rows):
            raise MemoryError(f"this rank has {len(rows)} chunks of GPU memory, and needs another")
        with self.cuda.Device(self.number):
            try:
                pointer = self.runtime.malloc(nbytes)
            except self.runtime.CUDARuntimeError:  # CuPy's pool may keep what nobody uses
                self.xp.get_default_memory_pool().free_all_blocks()
                pointer = self.runtime.malloc(nbytes)
        owner = Owner(self.runtime.free, pointer)
        handle = self.runtime.ipcGetMemHandle(pointer) if self.export else bytes(64)
        row = os.getpid(), self.number, pointer, nbytes, np.frombuffer(handle, np.uint8)
        rows[len(self.chunks)] = row
        self.chunks.append(self.cuda.UnownedMemory(pointer, nbytes, owner, self.number))
        return self.chunks[-1]

    # Places: how ranks tell each other where an array is.

    def offset_of(self, array: Array | None) -> int:
        """Return the place of a contiguous array of this rank's chunks, or DEVICE."""
        if array is not None and on_gpu(array) and array.flags.c_contiguous:
            for number, chunk in enumerate(self.chunks):
                start = array.data.ptr - chunk.ptr
                if 0 <= start and start + array.nbytes <= chunk.size:
                    return DEVICE | self.rank << RANK | (number + 1) << CHUNK | start
        return DEVICE

    def view(self, place: int, count: int, dtype: np.dtype) -> Array:
        """Return `count` elements of any rank's chunks, without a copy."""
        place &= DEVICE - 1
        rank, number = place >> RANK, (place >> CHUNK) % (1 << RANK - CHUNK) - 1
        chunk = self.chunks[number] if rank == self.rank else self.open(rank, number)
        start = place % (1 << CHUNK)
        return self.xp.ndarray((count,), dtype, self.cuda.MemoryPointer(chunk, start))

    def open(self, rank: int, number: int):
        """Return another rank's chunk, as memory of this rank's GPU."""
        if (rank, number) not in self.opened:
            pid, device, pointer, nbytes, handle = self.tables[rank]["chunks"][number].item()
            if not nbytes:
                raise WrongInput(f"rank {rank} has no GPU memory to share")
            with self.cuda.Device(self.number):
                pointer, owner = self._map(pid, device, pointer, handle)
            memory = self.cuda.UnownedMemory(pointer, nbytes, owner, self.number)
            self.opened[rank, number] = memory
        return self.opened[rank, number]

    def _map(self, pid: int, device: int, pointer: int, handle: np.ndarray) -> tuple:
        """Return another rank's chunk as an address of this process, and the address's owner."""
        if pid != os.getpid():
            pointer = self.runtime.ipcOpenMemHandle(handle.tobytes())
            return pointer, Owner(self.runtime.ipcCloseMemHandle, pointer)
        if device != self.number:
            if not self.runtime.deviceCanAccessPeer(self.number, device):
                raise WrongInput(f"GPU {self.number} cannot use the memory of GPU {device}")
            self.runtime._deviceEnsurePeerAccess(device)
        return pointer, None

    # The order of events.

    def synchronize(self) -> None:
        """Return when this thread's stream is done: other ranks may then use what it has used."""
        self.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        """Close what this rank has opened; wait until the others have closed what is this rank's.

        Until then this process must not end: it is undefined what happens to memory that is freed
        while another process has it open.
        """
        self.runtime.deviceSynchronize()
        self.opened.clear()
        self.tables[self.rank]["closed"] = 1
        deadline = time.monotonic() + PATIENCE
        while not all(table["closed"] for table in self.tables) and time.monotonic() < deadline:
            time.sleep(0.001)
