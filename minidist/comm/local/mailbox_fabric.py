"""MailboxFabric: one rank's mailbox, the memory that it shares, and what it has sent and waits for.

Threads, local processes and processes under MPI all use it. They differ in how a message gets into
a mailbox.
"""

import threading
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

import numpy as np

from minidist.backend import Array, clock, device_module, on_gpu, synchronize, to_device, use_device
from minidist.comm.diagnosis import Snapshot, Wait, snapshot
from minidist.comm.fabric import Communicator, NewGroup
from minidist.comm.local.board import BLOCK
from minidist.comm.local.device_memory import TABLE, DeviceMemory
from minidist.comm.local.wiring import Place, Wiring
from minidist.comm.message import Key, Staged, staged
from minidist.events import EventLog


class Opened(Protocol):
    """A communicator of NCCL: what has to be ended."""

    def destroy(self) -> None: ...

    def abort(self) -> None: ...


class Outgoing:
    """What one rank sends to one other, by one thread at a time: the one that has the lock.

    posted  messages ever sent
    sent    {tag: messages} of this run, without the messages of collectives
    """

    def __init__(self) -> None:
        self.lock, self.posted = threading.Lock(), 0
        self.sent = defaultdict[int, int](int)  # a Counter takes twice as long


class MailboxFabric:
    """A Fabric (see fabric.py) of a mailbox and shared memory; its attributes are those of one run.

    outgoing                   for each rank, what this one has sent there
    run, worker, log           the number of the run; the thread that runs the worker; its events
    older                      the threads of this process that were there before the run
    blocks                     of the boards of groups that this run has made by `split`
    table, device_memory       shared memory for the list of this rank's GPU memory, until the ranks
                               have met; then what they share on GPUs, or None
    opened                     {name of a group: its communicator of NCCL}, of this run
    reordered                  see Fabric
    """

    def __init__(self, place: "Place[MailboxFabric]", wiring: Wiring):
        self.rank, self.size, self.device = place.rank, place.size, place.device
        self.hosts, self.connect, self.wiring = place.hosts, place.connect, wiring
        self.mailbox, self.memory, self.deliver = wiring.mailbox, wiring.memory, wiring.deliver
        self.own_process = wiring.own_process
        self.outgoing = [Outgoing() for _ in range(self.size)]
        self.run = 0
        self.worker: int | None = None
        self.older: list[threading.Thread] | None = None
        self.log: EventLog | None = None
        self.blocks: list[np.ndarray] = []
        self.opened: dict[tuple[int, ...], Opened] = {}
        self.reordered = False
        self.block = self._zeros()  # the first array in every region: at one offset in each
        self.table: np.ndarray | None = None
        self.device_memory: DeviceMemory | None = None
        if wiring.alarm is not None and self.device != "cpu":
            self.table = self.memory.empty(1, TABLE)  # the second; untouched so far, hence zeros

    # What Group needs.

    def communicator(self, new: NewGroup, parent: Communicator | None) -> Communicator | None:
        return self.connect(self, new, parent)

    def send(self, to: int, key: Key, array: Array | Staged) -> None:
        self.mailbox.enter(key.run)
        gpu = False
        if type(array) is not np.ndarray and isinstance(array := staged(array), Staged):
            array, gpu = array.host if self.own_process else array.array, True
        outgoing = self.outgoing[to]
        outgoing.lock.acquire()  # `with` would take twice as long
        try:
            outgoing.posted += 1
            if key.kind == "message":
                outgoing.sent[key.number] += 1
            self.deliver(to, key, (array, gpu))
        finally:
            outgoing.lock.release()

    def recv(self, sources: list[int], key: Key, operation: str) -> tuple[int, Array]:
        source, (array, was_on_gpu) = self.mailbox.take(sources, key, operation)
        if not was_on_gpu:
            return source, array
        if not on_gpu(array):
            return source, to_device(array, "gpu")
        own = array.copy()
        synchronize(own)  # the memory of `array` may then go back to the sender's stream
        return source, own

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Array:
        if self.device_memory is not None:
            return self.device_memory.empty(shape, dtype)
        if self.device != "cpu":
            return device_module(self.device).empty(shape, dtype)
        return self.memory.empty(shape, dtype)

    def use_device(self) -> None:
        use_device(self.device, self.hosts[: self.rank].count(self.hosts[self.rank]))

    def in_place(self, array: Array) -> bool:
        memories = self.memory, self.device_memory
        return any(m is not None and m.offset_of(array) != m.nowhere for m in memories)

    def waiting(self, wait: Wait) -> AbstractContextManager[None]:
        return self.mailbox.waiting(wait)

    def fail(self, error: Exception) -> NoReturn:
        self.mailbox.close(error)
        self.mailbox.check_open(self.run)
        raise error

    # What a communicator in shared memory needs.

    def new_block(self) -> np.ndarray:
        """Return memory for this rank's part of a Board."""
        self.blocks.append(self._zeros())  # a slow rank may still read it when its group is gone
        return self.blocks[-1]

    def _zeros(self) -> np.ndarray:
        block = self.memory.empty(BLOCK, np.uint8)
        block[:] = 0
        return block

    # What a transport needs.

    def begin(self, run: int, logged: bool = False) -> None:
        """Start a run, when all ranks have ended the one before."""
        self.use_device()
        self.run = run
        self.log = EventLog(rank=self.rank, clock=clock(self.device)) if logged else None
        self.mailbox.drop_runs_before(run)
        for outgoing in self.outgoing:
            outgoing.sent.clear()
        self.blocks.clear()
        self.reordered = False
        self.free_groups()  # now that no rank uses one any more, else this would wait
        self.worker = threading.get_ident()
        self.older = threading.enumerate() if self.own_process else None

    def end(self) -> None:
        """End the run on this rank: stop every thread that still communicates in it."""
        self.mailbox.end(self.run)

    def free_groups(self, failed: bool = False) -> None:
        """Destroy the communicators of NCCL, in one order on all ranks; if `failed`, abort them.

        To destroy one waits for its kernels, which end only if the other ranks start theirs.
        """
        for name in sorted(self.opened):
            library = self.opened.pop(name)
            library.abort() if failed else library.destroy()

    def close(self, failed: bool = False) -> None:
        """Close what this rank has open on GPUs, before it ends; `failed` as in `free_groups`."""
        self.free_groups(failed)
        if self.device_memory is not None:
            self.device_memory.close()

    def unreceived(self) -> dict[tuple[int, int, int], int]:
        """Return {(source, to, tag): messages sent minus received} of this run, as this rank knows.

        Summed over all ranks, what is left was never received.
        """
        known: Counter[tuple[int, int, int]] = Counter()
        for to, outgoing in enumerate(self.outgoing):
            for tag, n in dict(outgoing.sent).items():
                known[self.rank, to, tag] = n
        for (source, tag), n in dict(self.mailbox.received).items():
            known[source, self.rank, tag] -= n
        return dict(known)

    def snapshot(self) -> Snapshot:
        """Return what this rank waits for at this moment."""
        mailbox = self.mailbox
        mailbox.notify()
        posted = sum(outgoing.posted for outgoing in self.outgoing)
        return snapshot(mailbox.waits, self.worker, self.older, posted, mailbox.count)
