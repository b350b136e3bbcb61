"""Memory that all ranks of a machine see: one anonymous file, of which every rank owns a region.

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

from minidist.backend import elements
from minidist.comm.collectives import split_ends

REGION = 1 << 34  # bytes of addresses per rank; less where `ulimit` allows less
KEEP = 1 << 28  # bytes of freed places per rank whose pages are kept for reuse
NOWHERE = 0  # no array begins here: each region begins with what its rank shows on a board
LINE = 64  # bytes of a cache line: where every array begins
PIECE = 1 << 17  # bytes: a piece of each of a few ranks' slices fits a core's cache
STAGE = 1 << 21  # bytes: the stages of a few ranks fit the cache that cores share


def create_file(size: int) -> int:
    """Return the descriptor of a nameless file with a region for each of `size` ranks."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minidist")
    else:
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
        """Return an uninitialised array in this rank's region; its place is reused when it dies.

        Raises MemoryError where the region has no room for it.
        """
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


def reduce_where_it_lies(
    memory: SharedMemory, board, places: list[int], count: int, dtype, combine
) -> None:
    """Reduce arrays in shared memory, one per rank, each into itself; they begin at `places`.

    Each rank reduces its slice of all of them and writes the total into all of them. Nobody else
    touches that slice, so one barrier, at the end, is enough. The ranks have met before.
    """
    arrays = [memory.view(place, count, dtype) for place in places]
    ends = split_ends(count, len(arrays))
    reduce_slice(arrays, arrays, ends[board.me], ends[board.me + 1], combine)
    board.barrier("all_reduce, every slice reduced")


def scatter_sum_where_it_lies(
    memory: SharedMemory, board, places: list[int], count: int, begin: int, combine, result
) -> None:
    """Reduce elements from `begin` on of arrays in shared memory into `result`, as many as it has.

    The ranks have met before; when this returns, all have read, so x may be written to again.
    """
    size = len(result)
    sources = [memory.view(p, count, result.dtype)[begin : begin + size] for p in places]
    reduce_slice(sources, [result], 0, size, combine)
    board.barrier("reduce_scatter, every slice reduced")


def gather_where_it_lies(memory: SharedMemory, board, places, out, begin: int, stop: int) -> None:
    """Write [begin, stop) of `out` into the other ranks' arrays, which lie in shared memory.

    They begin at `places`, one per rank. The ranks have met before, so all are free to be written.
    """
    for rank, place in enumerate(places):
        if rank != board.me:
            memory.view(place, len(out), out.dtype)[begin:stop] = out[begin:stop]
    board.barrier("all_gather, every piece written")


def reduce_through_stages(memory: SharedMemory, board, signature, x, combine, result) -> None:
    """Reduce flat x, wherever it lies, into flat `result`, which may be x: through stages.

    A stage is a little shared memory of each rank, which stays in the caches however large x is:

        put what others reduce into my stage | meet | reduce my slice, write the total into `result`
        and into the others' stages | meet | fetch from my stage what others have reduced

    and again for the next part of x. Between two such rounds a stage is touched by its rank alone.
    """
    size, me = len(board.words), board.me
    step = max(1, STAGE // x.itemsize // size) * size  # so that slices add up to those of all x
    stage = memory.empty(min(step, x.size), x.dtype)
    place = memory.offset_of(stage)
    for low in range(0, x.size, step):
        part, total = x[low : low + step], result[low : low + step]
        ends = split_ends(part.size, size)
        start, stop = ends[me], ends[me + 1]
        stage[:start], stage[stop : part.size] = part[:start], part[stop:]
        stages = [memory.view(p, part.size, x.dtype) for p in board.meet(signature, place)]
        before, after = stages[:me], stages[me + 1 :]
        sources, targets = [*before, part, *after], [*before, total, *after]
        reduce_slice(sources, targets, start, stop, combine)
        board.barrier("all_reduce, every slice reduced")
        total[:start], total[stop:] = stage[:start], stage[stop : part.size]


def reduce_slice(sources: list, targets: list, start: int, stop: int, combine) -> None:
    """Reduce [start, stop) of two or more sources, in their order, into every target.

    It goes in pieces that fit a core's cache, so that the targets are written while they are hot.
    The first target may be the first source, but no other one. `combine` is a ufunc of NumPy.
    """
    step = max(1, PIECE // sources[0].itemsize)
    for low in range(start, stop, step):
        piece = slice(low, min(low + step, stop))
        first, second, *others = [source[piece] for source in sources]
        total, *copies = [target[piece] for target in targets]
        combine(first, second, out=total)
        for other in others:
            combine(total, other, out=total)
        for copy in copies:
            copy[:] = total
