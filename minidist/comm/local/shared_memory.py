"""Memory that all ranks of a machine see: one anonymous file; each rank allocates in its region.

    file  | region of rank 0 | region of rank 1 | ...        every rank maps all of it

A region is a wide range of addresses; pages cost memory only once they are touched. The file has no
name (`memfd_create`, or a temporary file that is unlinked at once), so nothing is left when the
ranks are gone, and a small /dev/shm is no limit. Ranks that are threads share an anonymous map.
"""

import mmap
import os
import resource
import tempfile
import threading
import weakref

import numpy as np

from minidist.backend import Array, elements

REGION = 1 << 34  # bytes of addresses per rank; less where `ulimit` allows less
KEEP = 1 << 28  # bytes of freed places per rank whose pages are kept for reuse
NOWHERE = 0  # the offset of no array: the first line of a region is not used
LINE = 64  # bytes of a cache line: where every array begins
BLOCK = LINE  # bytes with which a rank takes part in a Board


def create_file(size: int) -> int:
    """Return the descriptor of a nameless file with a region for each of `size` ranks."""
    try:
        descriptor = os.memfd_create("minidist")
    except (AttributeError, PermissionError):  # macOS; a sandbox that refuses such memory
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size * min(REGION, allowed(size)))
    return descriptor


def allowed(size: int) -> int:
    """Return the bytes of a region that leave room for others under the limits of this process."""
    limits = [resource.RLIMIT_AS, resource.RLIMIT_FSIZE]
    bytes_ = [most for most, _ in map(resource.getrlimit, limits) if most != resource.RLIM_INFINITY]
    share = min(bytes_, default=2 * size * REGION) // (2 * size)
    return share // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY


def size_class(nbytes: int) -> int:
    """Round up, by an eighth at most and to whole lines, so that freed places fit other arrays."""
    grain = max(LINE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-max(1, nbytes) // grain) * grain


class SharedMemory:
    """All regions, mapped. This rank allocates in its own, from `rank * region` onwards.

    The attributes of the class, and the methods without an underscore, are DeviceMemory's, too.

    device   where it is
    nowhere  the place of an array that is not in it
    stage    bytes of a stage: the stages of a few ranks fit the cache that cores share
    piece    bytes to be reduced at once: a piece of each of a few ranks' slices fits a core's cache
    xp       the module of its arrays
    """

    device, nowhere, stage, piece, xp = "cpu", NOWHERE, 1 << 21, 1 << 17, np

    def __init__(self, mapped: mmap.mmap, rank: int, size: int):
        self.map, self.rank = mapped, rank
        self.region = len(mapped) // size
        self.begin = rank * self.region
        self.top = self.begin + LINE  # of what is in use; so no array begins at NOWHERE
        self.free: dict[int, list[int]] = {}  # places that still have their pages, by size
        self.bare: dict[int, list[int]] = {}  # places whose pages were given back
        self.kept = 0  # bytes in `free`
        self.lock = threading.RLock()  # an array may die, and be released, in the middle of `empty`
        self.address = np.frombuffer(mapped, np.uint8, 1).ctypes.data

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype | type | str) -> np.ndarray:
        """Return an uninitialised array in this rank's region; its place is reused when it dies.

        Raises MemoryError where the region has no room for it.
        """
        dtype = np.dtype(dtype)
        count = elements(shape)
        nbytes = size_class(count * dtype.itemsize)
        with self.lock:
            start = self._place(nbytes)
        place = np.frombuffer(self.map, np.uint8, nbytes, start)
        weakref.finalize(place, self._release, start, nbytes).atexit = False
        return place[: count * dtype.itemsize].view(dtype).reshape(shape)

    # Fast path: skip at first reading. Freed places are reused by size; only many lose their pages.

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

    # Offsets: how ranks tell each other where an array is.

    def offset_of(self, array: Array | None) -> int:
        """Return where in the map a contiguous array of this rank's region begins, or NOWHERE."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            return NOWHERE
        offset = array.__array_interface__["data"][0] - self.address
        inside = self.begin <= offset and offset + array.nbytes <= self.begin + self.region
        return offset if inside else NOWHERE

    def view(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return `count` elements of any rank's region, without a copy."""
        return np.frombuffer(self.map, dtype, count, offset)

    def synchronize(self) -> None:
        """Return when this thread's work in this memory is done: on the host at once."""
