"""A communicator for host arrays of one machine: ranks read and write each other's memory.

When ranks meet, each publishes the offset of its array in shared memory, or NOWHERE, so that all
choose the same path. If every array is in shared memory, it is reduced, or written to, in place.
Otherwise all_reduce copies through stages, a little shared memory of each rank, and the other two
are left to messages. Letters: N ranks. Every path moves the same bytes (see Group).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minidist.backend import Array, beside, on_gpu, to_host
from minidist.comm.arguments import ufunc
from minidist.comm.board import Board
from minidist.comm.collectives import split_ends
from minidist.comm.diagnosis import Signature, signature_of
from minidist.comm.ledger import Ledger
from minidist.comm.mailbox_fabric import MailboxFabric
from minidist.comm.shared_memory import NOWHERE, SharedMemory

if TYPE_CHECKING:
    from minidist.comm.mpi_communicator import MpiCommunicator

PIECE = 1 << 17  # bytes: a piece of each of a few ranks' slices fits a core's cache
STAGE = 1 << 21  # bytes: the stages of a few ranks fit the cache that cores share


class SharedMemoryCommunicator:
    """A Communicator (see fabric.py) of shared memory, and a board on which its ranks meet."""

    def __init__(self, memory: SharedMemory, board: Board):
        self.memory, self.board, self.ledger = memory, board, Ledger()
        self.members, self.me, self.others = board.members, board.me, len(board.members) - 1

    @classmethod
    def connect(
        cls,
        fabric: MailboxFabric,
        members: list[int],
        splits: tuple[int, ...],
        parent: "SharedMemoryCommunicator | MpiCommunicator | None",
        within_host: bool = False,
    ) -> "SharedMemoryCommunicator | None":
        """Return a communicator of these ranks, each with a block of its own for their board."""
        memory = fabric.memory
        if parent is None:
            first = memory.offset_of(fabric.block) - memory.begin
            block, blocks = fabric.block, [rank * memory.region + first for rank in members]
        else:
            block = fabric.new_block() if members else None
            places = parent.exchange(memory.offset_of(block))
            blocks = [places[parent.members.index(rank)] for rank in members]
        return cls(memory, Board(fabric, blocks, members, block)) if members else None

    def meet(self, signature: Signature) -> None:
        self.board.meet(signature)

    def exchange(self, number: int) -> list[int]:
        """Return the number that each rank has given."""
        return self.board.meet(signature_of("split", (), None), number)

    def all_reduce(
        self, signature: Signature, x: Array, op: str, out: Array | None
    ) -> Array | None:
        if not self.others:
            return x if out is x else x.copy()
        place, combine = self.memory.offset_of(out), ufunc(op)
        if place != NOWHERE and out is not x:
            out[...] = to_host(x)
            x = out
        places = self.board.meet(signature, place)
        if NOWHERE not in places:
            self._reduce_in_place(places, x.size, x.dtype, combine)
            return out
        direct = out is x and x.flags.c_contiguous and not on_gpu(x)
        result = x if direct else np.empty(x.shape, x.dtype)
        flat = np.ascontiguousarray(to_host(x)).reshape(-1)
        self._reduce_staged(signature, flat, combine, result.reshape(-1))
        return beside(result, x)

    def reduce_scatter(
        self, signature: Signature, x: Array, ends: list[int], op: str
    ) -> Array | None:
        places = self._places(signature, x)
        if NOWHERE in places or x.ndim != 1:
            return None
        begin, stop = ends[self.me], ends[self.me + 1]
        result = np.empty(stop - begin, x.dtype)
        self.ledger.bytes["reduce_scatter"] += x.nbytes - result.nbytes  # the others read it
        sources = [self.memory.view(place, x.size, x.dtype)[begin:stop] for place in places]
        reduce_slice(sources, [result], 0, len(result), ufunc(op))
        self.board.barrier("reduce_scatter, every slice reduced")  # now x may be written to again
        return result

    def gather_into(self, signature: Signature, out: Array, ends: list[int]) -> Array | None:
        places = self._places(signature, out)
        if NOWHERE in places:
            return None
        mine = slice(ends[self.me], ends[self.me + 1])
        for rank, place in enumerate(places):
            if rank != self.me:
                self.memory.view(place, len(out), out.dtype)[mine] = out[mine]
                self.ledger.bytes["all_gather"] += out[mine].nbytes
        self.board.barrier("all_gather, every piece written")
        return out

    def _places(self, signature: Signature, x: Array) -> list[int]:
        """Meet; return where each rank's array is. One rank alone has nothing to move."""
        return self.board.meet(signature, self.memory.offset_of(x) if self.others else NOWHERE)

    def _reduce_in_place(
        self, places: list[int], count: int, dtype: np.dtype, combine: Callable[..., Array]
    ) -> None:
        """Reduce arrays in shared memory, one per rank, each into itself; they begin at `places`.

        Each rank reduces its slice of all of them and writes the total into all of them. Nobody
        else touches that slice, so one barrier, at the end, is enough.
        """
        arrays = [self.memory.view(place, count, dtype) for place in places]
        ends = split_ends(count, len(arrays))
        start, stop = ends[self.me], ends[self.me + 1]
        read, written = start + count - stop, self.others * (stop - start)
        self.ledger.bytes["all_reduce"] += (read + written) * dtype.itemsize
        reduce_slice(arrays, arrays, start, stop, combine)
        self.board.barrier("all_reduce, every slice reduced")

    def _reduce_staged(
        self, signature: Signature, x: np.ndarray, combine: Callable[..., Array], result: np.ndarray
    ) -> None:
        """Reduce flat x, wherever it is, into flat `result`, which may be x: through stages.

        A stage is a little shared memory of each rank, which stays in the caches however large x
        is:

            put what others reduce into my stage | meet | reduce my slice, write the total into
            `result` and the others' stages | meet | fetch from my stage what others have reduced

        and again for the next part of x. Between two such rounds only its rank touches a stage.
        """
        size, me = self.others + 1, self.me
        step = max(1, STAGE // x.itemsize // size) * size  # so that slices add up to those of all x
        stage = self.memory.empty(min(step, x.size), x.dtype)
        place = self.memory.offset_of(stage)
        for low in range(0, x.size, step):
            part, total = x[low : low + step], result[low : low + step]
            ends = split_ends(part.size, size)
            start, stop = ends[me], ends[me + 1]
            stage[:start], stage[stop : part.size] = part[:start], part[stop:]
            places = self.board.meet(signature, place)
            stages = [self.memory.view(p, part.size, x.dtype) for p in places]
            before, after = stages[:me], stages[me + 1 :]
            sources, targets = [*before, part, *after], [*before, total, *after]
            reduce_slice(sources, targets, start, stop, combine)
            read, written = start + part.size - stop, self.others * (stop - start)
            self.ledger.bytes["all_reduce"] += (read + written) * x.itemsize
            self.board.barrier("all_reduce, every slice reduced")
            total[:start], total[stop:] = stage[:start], stage[stop : part.size]


def reduce_slice(
    sources: list[np.ndarray],
    targets: list[np.ndarray],
    start: int,
    stop: int,
    combine: Callable[..., Array],
) -> None:
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
