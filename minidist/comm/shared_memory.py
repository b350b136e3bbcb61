"""Memory that all ranks of a machine see: one anonymous file, of which every rank owns a region.

    file  | region of rank 0 | region of rank 1 | ...        every rank maps all of it

A region is a wide range of addresses; pages cost memory only once they are touched. The file has no
name (`memfd_create`, or a temporary file that is unlinked at once), so nothing is left when the
ranks are gone, and a small /dev/shm is no limit. Ranks that are threads share an anonymous map.
"""

import mmap
import os
import tempfile
import threading
import weakref

import numpy as np

from minidist.backend import elements

REGION = 1 << 34  # bytes of addresses per rank
KEEP = 1 << 28  # bytes of freed places per rank whose pages are kept for reuse
LINE = 64  # bytes of a cache line: where every array begins
PIECE = 1 << 17  # bytes: a piece of each of a few ranks' slices fits a core's cache


def create_file(size: int) -> int:
    """Return the descriptor of a nameless file with a region for each of `size` ranks."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minidist")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size * REGION)
    return descriptor


def size_class(nbytes: int) -> int:
    """Round up, by an eighth at most and to whole lines, so that freed places fit other arrays."""
    grain = max(LINE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-max(1, nbytes) // grain) * grain


class SharedMemory:
    """All regions, mapped; this rank allocates in its own, `rank * REGION` onwards."""

    def __init__(self, mapped: mmap.mmap, rank: int, size: int):
        self.map, self.rank = mapped, rank
        self.region = len(mapped) // size
        self.begin = self.top = rank * self.region
        self.free: dict[int, list[int]] = {}  # places that still have their pages, by size
        self.bare: dict[int, list[int]] = {}  # places whose pages were given back
        self.kept = 0  # bytes in `free`
        self.lock = threading.RLock()  # an array may die, and be released, in the middle of `empty`
        self.address = np.frombuffer(mapped, np.uint8, 1).ctypes.data

    def empty(self, shape, dtype) -> np.ndarray:
        """Return an uninitialised array in this rank's region; its place is reused when it dies."""
        dtype = np.dtype(dtype)
        count = elements(shape)
        nbytes = size_class(count * dtype.itemsize)
        with self.lock:
            start = self._place(nbytes)
        whole = np.frombuffer(self.map, np.uint8, nbytes, start)
        weakref.finalize(whole, self._release, start, nbytes).atexit = False
        return whole[: count * dtype.itemsize].view(dtype).reshape(shape)

    def _place(self, nbytes: int) -> int:
        if self.free.get(nbytes):
            self.kept -= nbytes
            return self.free[nbytes].pop()
        if self.bare.get(nbytes):
            return self.bare[nbytes].pop()
        start = self.top
        if start + nbytes > self.begin + self.region:
            raise MemoryError(f"{nbytes} bytes do not fit a region of {self.region} bytes")
        self.top = start + nbytes
        return start

    def _release(self, start: int, nbytes: int) -> None:
        """Keep a place for the next array of its size, and its pages while they are not many."""
        with self.lock:
            if self.kept + nbytes <= KEEP or not hasattr(mmap, "MADV_REMOVE"):
                self.kept += nbytes
                self.free.setdefault(nbytes, []).append(start)
                return
            first, last = -(-start // mmap.PAGESIZE), (start + nbytes) // mmap.PAGESIZE
            if last > first:
                pages = (last - first) * mmap.PAGESIZE
                self.map.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, pages)
            self.bare.setdefault(nbytes, []).append(start)

    def offset_of(self, array) -> int | None:
        """Return where in the map a contiguous array of this rank's region begins, or None."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return None
        offset = array.__array_interface__["data"][0] - self.address
        inside = self.begin <= offset and offset + array.nbytes <= self.begin + self.region
        return offset if inside else None

    def view(self, offset: int, count: int, dtype) -> np.ndarray:
        """Return `count` elements of any rank, without a copy."""
        return np.frombuffer(self.map, dtype, count, offset)


def all_reduce_shared(
    memory: SharedMemory, board, offsets: list[int], sizes: list[int], combine, result: np.ndarray
) -> None:
    """Reduce the arrays that begin at `offsets` of the memory, one per rank, into flat `result`.

    Each rank reduces one slice straight from everyone's memory into its own, in rank order, in
    pieces that fit the cache; then it copies all slices to `result`, which may be its own memory.
    The ranks have met before; when this returns, all have copied, so that the memory may be written
    to again.

    sizes    elements of each rank's slice
    combine  the reduction, as a ufunc of two arrays
    """
    views = [memory.view(offset, result.size, result.dtype) for offset in offsets]
    mine, ends = views[board.me], np.cumsum([0, *sizes]).tolist()
    start, stop = ends[board.me], ends[board.me + 1]
    step = max(1, PIECE // result.itemsize)
    for low in range(start, stop, step):
        piece = slice(low, min(low + step, stop))
        total = combine(views[0][piece], views[1][piece]) if len(views) > 1 else views[0][piece]
        for view in views[2:]:
            combine(total, view[piece], out=total)
        mine[piece] = total
    board.barrier("all_reduce, every slice reduced")
    in_place = memory.offset_of(result) == offsets[board.me]
    for rank, view in enumerate(views):
        if rank != board.me or not in_place:
            result[ends[rank] : ends[rank + 1]] = view[ends[rank] : ends[rank + 1]]
    board.barrier("all_reduce, every slice copied")
