"""A communicator for arrays of one machine: ranks read and write each other's memory.

When ranks meet, on a Board, each publishes the place of its array in shared memory, or that it has
none, so that all choose the same path. If every array is in shared memory, it is reduced, or
written to, in place. Otherwise all_reduce copies through stages, a little shared memory of each
rank, and the other two are left to messages. Arrays of GPUs are reduced on the GPUs, in
DeviceMemory, if all ranks come with one, and otherwise on the host. Letters: N ranks. Every path
moves the same bytes (see Group), and gives the same bits.
"""

import sys
import threading
from collections.abc import Callable

import numpy as np

from minidist.backend import Array, on_device_of, on_gpu, to_device
from minidist.comm.arguments import ufunc
from minidist.comm.communicator import Communicator, Key, Ledger, NewGroup
from minidist.comm.diagnosis import Signature, Wait, call_site, signature_of
from minidist.comm.fabric import Fabric
from minidist.comm.local.device_memory import DEVICE, DeviceMemory
from minidist.comm.local.shared_memory import BLOCK, NOWHERE, SharedMemory
from minidist.pieces import split_ends

ARRIVED, SLEEPS, FINGERPRINT, OFFSET = 0, 1, 2, 4  # 8-byte words; the last two exist twice


class Board:
    """The blocks of a group's ranks, one per member, at these offsets of the shared memory.

    What a rank shows has two places, used in turn: a fast rank may already show its next call while
    a slow one still reads the one before.

    blocks  where each member's block begins; they are zeros at first, or from an earlier run
    block   this rank's own, as an array: its memory is not reused while a thread has this board
    me      this rank's number in the group
    """

    def __init__(self, fabric: Fabric, new: NewGroup, blocks: list[int], block: np.ndarray):
        self.fabric, self.mailbox, self.run = fabric, fabric.mailbox, fabric.run
        self.members, self.splits, self.block = new.members, new.splits, block
        self.me = self.members.index(fabric.rank)
        shared = memoryview(fabric.memory.map)
        self.words = [shared[start : start + BLOCK].cast("Q") for start in blocks]
        self.mine = self.words[self.me]
        self.others = [(words, rank) for words, rank in zip(self.words, self.members, strict=True)]
        del self.others[self.me]
        self.step, self.meetings = self.run << 32, 0
        self.lock = threading.Lock()

    def meet(self, signature: Signature, offset: int = 0) -> list[int]:
        """Wait for all ranks. The signature must be the same on all of them.

        Return the offset that each rank has shown. Raise CollectiveMismatch, on every rank, if the
        signatures differ.
        """
        self.mailbox.check_open(self.run)
        self.meetings += 1
        side = self.meetings % 2
        self.mine[FINGERPRINT + side] = signature.fingerprint
        self.mine[OFFSET + side] = offset
        self.barrier(signature.text)
        if any(words[FINGERPRINT + side] != signature.fingerprint for words, _ in self.others):
            key = Key(self.run, self.splits, "meeting", self.meetings)
            self.fabric.explain(self.members, key, signature)
        return [words[OFFSET + side] for words in self.words]

    def barrier(self, operation: str) -> None:
        """Return when every rank has called this."""
        if not self.others:
            return
        self.mailbox.enter(self.run)
        self.step += 1
        self._fence()
        self.mine[ARRIVED] = self.step
        self._fence()  # else each might miss the other: we its sleep, it our arrival
        if self._all_have_come():  # the last rank to come sees this, and wakes those that sleep
            for words, rank in self.others:
                if words[SLEEPS] == self.step:
                    assert self.fabric.wake is not None  # who has none polls
                    self.fabric.wake(rank)
        elif not self.mailbox.spin(self._all_have_come):
            self._sleep(operation)
        self._fence()
        self.mailbox.check_open(self.run)  # else the blocks may be another run's by now

    def _fence(self) -> None:
        """Order all memory accesses before this call before all that follow, on any processor."""
        for _ in range(2):
            self.lock.acquire()  # `with` would take twice as long
            self.lock.release()

    def _all_have_come(self) -> bool:
        for words, _ in self.others:
            if words[ARRIVED] < self.step:
                return False
        return True

    def missing(self) -> list[int]:
        return [rank for words, rank in self.others if words[ARRIVED] < self.step]

    def _sleep(self, operation: str) -> None:
        """Wait for the other ranks, or for the end of the run."""
        with self.mailbox.waiting(Wait(operation, self.missing, call_site())):
            # Never cleared: a thread that an earlier run has left may do so when we sleep here.
            self.mine[SLEEPS] = self.step if self.fabric.wake is not None else 0
            self._fence()
            self.mailbox.sleep_until(lambda: not self.missing() or self.mailbox.is_over(self.run))


Memory = SharedMemory | DeviceMemory


class SharedMemoryCommunicator:
    """A Communicator (see communicator.py) of shared memory, and a board on which its ranks meet.

    memory  of the host;  device_memory  of the GPUs, or None
    """

    library = None

    def __init__(
        self, memory: SharedMemory, board: Board, device_memory: DeviceMemory | None = None
    ):
        self.memory, self.device_memory, self.board = memory, device_memory, board
        self.ledger = Ledger()
        self.members, self.me, self.others = board.members, board.me, len(board.members) - 1

    @classmethod
    def connect(
        cls, fabric: Fabric, new: NewGroup, parent: Communicator | None
    ) -> "SharedMemoryCommunicator | None":
        """Return a communicator of these ranks, each with a block of its own for their board."""
        memory, members = fabric.memory, new.members
        if parent is None:
            first = memory.offset_of(fabric.block) - memory.begin
            block, blocks = fabric.block, [rank * memory.region + first for rank in members]
        else:
            new_block = fabric.new_block() if members else None
            places = parent.exchange(memory.offset_of(new_block))
            if new_block is None:
                return None
            block, blocks = new_block, [places[parent.members.index(rank)] for rank in members]
        board = Board(fabric, new, blocks, block)
        if parent is None and fabric.table is not None and len(members) > 1:
            table, fabric.table = fabric.table, None
            fabric.device_memory = share_device_memory(memory, table, fabric.own_process, board)
        return cls(memory, board, fabric.device_memory)

    def meet(self, call: Signature) -> None:
        self.board.meet(call)

    def exchange(self, number: int) -> list[int]:
        return self.board.meet(signature_of("split"), number)

    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> Array | None:
        if not self.others:
            return x if out is x else x.copy()
        here = self._memory_of(x)
        if out is not None and out is not x and here.offset_of(out) != here.nowhere:
            out[...] = on_device_of(x, out)
            x = out
        memory, places = self._meet(call, here, out)
        combine = ufunc(op, memory.xp)
        if places:
            self._reduce_in_place(memory, places, x.size, x.dtype, combine)
            return out
        flat: Array = memory.xp.ascontiguousarray(to_device(x, memory.device)).reshape(-1)
        direct = x.flags.c_contiguous and on_gpu(x) == on_gpu(flat) and out is x
        result = x if direct else memory.xp.empty(x.shape, x.dtype)
        self._reduce_staged(memory, call, flat, combine, result.reshape(-1))
        return on_device_of(result, x)

    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> Array | None:
        memory, places = self._meet(call, self._memory_of(x), x)
        if not places or x.ndim != 1:
            return None
        mine = slice(ends[self.me], ends[self.me + 1])
        result = memory.xp.empty(mine.stop - mine.start, x.dtype)
        self.ledger.bytes["reduce_scatter"] += x.nbytes - result.nbytes  # the others read it
        sources = [memory.view(place, x.size, x.dtype)[mine] for place in places]
        reduce_slices(sources, [result], ufunc(op, memory.xp), memory.piece)
        self._barrier(memory, "reduce_scatter, every slice reduced")  # x may be written to again
        return result

    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> Array | None:
        memory, places = self._meet(call, self._memory_of(out), out)
        if not places:
            return None
        mine = slice(ends[self.me], ends[self.me + 1])
        for rank, place in enumerate(places):
            if rank != self.me:
                memory.view(place, len(out), out.dtype)[mine] = out[mine]
                self.ledger.bytes["all_gather"] += out[mine].nbytes
        self._barrier(memory, "all_gather, every piece written")
        return out

    def _memory_of(self, x: Array) -> Memory:
        """Return the memory in which an array is reduced without leaving the host, or the GPU."""
        return self.device_memory if self.device_memory and on_gpu(x) else self.memory

    def _meet(self, call: Signature, here: Memory, array: Array | None) -> tuple[Memory, list[int]]:
        """Meet; return in which memory all ranks reduce, and the places of their arrays there.

        No places if one rank's array is elsewhere, or if the group has one rank only.
        """
        here.synchronize()
        places = self.board.meet(call, here.offset_of(array) if self.others else NOWHERE)
        memory: Memory = self.memory
        on_gpus = [False]
        if self.device_memory is not None:
            on_gpus = [place >= DEVICE for place in places]
            memory = self.device_memory if all(on_gpus) else self.memory
        known = any(on_gpus) == all(on_gpus) and memory.nowhere not in places
        return memory, places if known else []

    def _barrier(self, memory: Memory, operation: str) -> None:
        memory.synchronize()
        self.board.barrier(operation)

    def _reduce_in_place(
        self,
        memory: Memory,
        places: list[int],
        count: int,
        dtype: np.dtype,
        combine: Callable[..., Array],
    ) -> None:
        """Reduce arrays in shared memory, one per rank, each into itself; they begin at `places`.

        Each rank reduces its slice of all of them and writes the total into all of them.
        """
        ends = split_ends(count, len(places))
        start, stop = ends[self.me], ends[self.me + 1]
        read, written = start + count - stop, self.others * (stop - start)
        self.ledger.bytes["all_reduce"] += (read + written) * dtype.itemsize
        slices = [memory.view(place, count, dtype)[start:stop] for place in places]
        reduce_slices(slices, _sum_here(memory, slices), combine, memory.piece)
        # No other rank touches this slice, so one barrier, at the end, is enough.
        self._barrier(memory, "all_reduce, every slice reduced")

    def _reduce_staged(
        self,
        memory: Memory,
        call: Signature,
        x: Array,
        combine: Callable[..., Array],
        result: Array,
    ) -> None:
        """Reduce flat x, wherever it is, into flat `result`, which may be x: through stages.

        A stage is a little shared memory of each rank, which on the host stays in the caches
        however large x is:

            put what others reduce into my stage | meet | reduce my slice, write the total into
            `result` and the others' stages | meet | fetch from my stage what others have reduced

        and again for the next part of x. Between two such rounds only its rank touches a stage.
        """
        size, me = self.others + 1, self.me
        step = max(1, memory.stage // x.itemsize // size) * size  # so parts' slices make up x's
        stage = memory.empty(min(step, x.size), x.dtype)
        for low in range(0, x.size, step):
            part, total = x[low : low + step], result[low : low + step]
            ends = split_ends(part.size, size)
            start, stop = ends[me], ends[me + 1]
            mine = slice(start, stop)
            stage[:start], stage[stop : part.size] = part[:start], part[stop:]
            _, places = self._meet(call, memory, stage)
            stages = [memory.view(place, part.size, x.dtype)[mine] for place in places]
            sources = [*stages[:me], part[mine], *stages[me + 1 :]]
            targets = [*stages[:me], total[mine], *stages[me + 1 :]]
            reduce_slices(sources, _sum_here(memory, targets), combine, memory.piece)
            read, written = start + part.size - stop, self.others * (stop - start)
            self.ledger.bytes["all_reduce"] += (read + written) * x.itemsize
            self._barrier(memory, "all_reduce, every slice reduced")
            total[:start], total[stop:] = stage[:start], stage[stop : part.size]


def _sum_here(memory: Memory, targets: list[Array]) -> list[Array]:
    """Return the targets of `reduce_slices`; the first of them gets every partial sum.

    On a GPU it is memory of this rank's own, so that what is another GPU's is written once.
    """
    return targets if memory.xp is np else [memory.xp.empty_like(targets[0]), *targets]


def reduce_slices(
    sources: list[Array], targets: list[Array], combine: Callable[..., Array], piece: int
) -> None:
    """Reduce two or more sources, in their order, into every target; all have one size.

    It goes in pieces of `piece` bytes, so that targets are written while they are in the cache. The
    first target may be the first source, but no other one. `combine` is a ufunc.
    """
    step = max(1, piece // sources[0].itemsize)
    for low in range(0, sources[0].size, step):
        part = slice(low, low + step)
        first, second, *others = [source[part] for source in sources]
        total, *copies = [target[part] for target in targets]
        combine(first, second, out=total)
        for other in others:
            combine(total, other, out=total)
        for copy in copies:
            copy[...] = total


def share_device_memory(
    shared: SharedMemory, table: np.ndarray, export: bool, board: Board
) -> DeviceMemory | None:
    """Return memory on this rank's GPU that all ranks can open; no rank gets any if one cannot.

    All ranks call this, once. The first rank that cannot prints the reason.
    """
    signature = signature_of("open the memory of all GPUs")
    reason: Exception | None = None
    memory: DeviceMemory | None = None
    try:
        memory = DeviceMemory(shared, table, export)
        memory.grow(1)
    except (RuntimeError, MemoryError) as error:
        reason = error
    board.meet(signature)
    try:
        if memory is not None and reason is None:
            for rank in board.members:
                memory.open(rank, 0)
    except (RuntimeError, ValueError) as error:
        reason = error
    able = board.meet(signature, int(reason is None))
    if all(able):
        return memory
    if able.index(0) == board.me:
        print(
            f"minidist: arrays on GPUs are reduced on the host, because rank {board.me} cannot "
            f"share GPU memory: {reason}",
            file=sys.stderr,
        )
    if memory is not None:
        memory.opened.clear()
    board.meet(signature)  # when all have closed the others' chunks, these may be freed
    return None
