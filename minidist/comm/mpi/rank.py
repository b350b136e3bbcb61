"""The rank of a process that `mpiexec` has started: its fabric, its messages, its communicators.

It is the fabric of a local rank. Its memory is shared by the ranks of its host. MPI cannot wake a
thread, so a thread that waits polls, first often, then seldom. A message is one MPI message, a
head and the bytes of the array behind it:

    | length of the head | head: key, dtype, shape   | elements            |
    | 8 bytes            | to a multiple of 64 bytes | to a multiple of 64 |

It is copied once, into that form, and MPI sends it while the rank goes on (`Isend`). It is received
into memory of its own, of which the array is a view. MPI keeps the order of each source; the
mailbox finds the key. MPI may count in 32 bits, so a message is counted in lines of 64 bytes: it
has at most 2^37 bytes.
"""

import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minidist.comm.communicator import (
    Communicator,
    Key,
    Message,
    NewGroup,
    pack_head,
    unpack_head,
)
from minidist.comm.diagnosis import signature_of
from minidist.comm.fabric import Connect, Fabric, Mailbox, Place, numbered
from minidist.comm.local.shared_memory import SharedMemory, create_file
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.mpi.communicator import SPINS, MpiCommunicator, Polling
from minidist.comm.mpi.library import load

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.MPI import Comm

LINE = 64  # bytes


def pack(key: Key, message: Message) -> np.ndarray:
    """Return the bytes of a message, in whole lines; a copy."""
    array, was_on_gpu = message
    head = pack_head((key, was_on_gpu, array.dtype, array.shape))
    begin = _lines(8 + len(head)) * LINE
    packed = np.empty(begin + _lines(array.nbytes) * LINE, np.uint8)
    packed[:8].view(np.int64)[0] = len(head)
    packed[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    if array.nbytes:
        packed[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return packed


def unpack(packed: np.ndarray) -> tuple[Key, Message]:
    """Return the (key, message) that was packed; the array is a view."""
    length = int(packed[:8].view(np.int64)[0])
    key, was_on_gpu, dtype, shape = unpack_head(packed[8 : 8 + length].data)
    begin = _lines(8 + length) * LINE
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    array = packed[begin : begin + nbytes].view(dtype).reshape(shape)
    return key, (array, was_on_gpu)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE)


class Sender:
    """A fabric's `deliver`; it keeps the memory of sends that are under way."""

    def __init__(self, comm: "MPI.Comm", line: "MPI.Datatype"):
        self.comm, self.line = comm, line
        self.pending: list[MPI.Request] = []
        self.lock = threading.Lock()

    def deliver(self, to: int, key: Key, message: Message) -> None:
        packed = pack(key, message)
        request = self.comm.Isend([packed, len(packed) // LINE, self.line], to)
        if not request.Test():
            with self.lock:
                self.pending.append(request)  # which refers to the memory

    def progress(self) -> bool:
        """Forget the sends that are done; return whether there are others."""
        with self.lock:
            self.pending = [request for request in self.pending if not request.Test()]
            return bool(self.pending)


class Source:
    """The messages of one rank; see `Polled` in fabric.py."""

    def __init__(self, comm: "MPI.Comm", line: "MPI.Datatype", source: int, status: "MPI.Status"):
        self.comm, self.line, self.source, self.status = comm, line, source, status
        self.under_way: tuple[MPI.Request, np.ndarray] | None = None

    def poll(self) -> tuple[Key, Message] | None:
        if self.under_way is None:
            message = self.comm.Improbe(self.source, status=self.status)
            if message is None:
                return None
            lines = self.status.Get_count(self.line)
            packed = np.empty(lines * LINE, np.uint8)
            self.under_way = message.Irecv([packed, lines, self.line]), packed
        request, packed = self.under_way
        if not request.Test():
            return None
        self.under_way = None
        return unpack(packed)

    def has_pending(self, checks: int = 1) -> bool:
        return self.under_way is not None or self.comm.Iprobe(self.source)

    def request_wake_up(self) -> None:
        """Nothing can wake a rank: one that waits polls."""


class MpiRank:
    """This process's rank in `world`; all ranks of it call this at once.

    hosts    the number of every rank's host
    connect  how to choose communicators; MPI's own if None
    over     how to choose those above them, given `connect`
    here     how many ranks are on this rank's host
    made     MPI's communicators for the groups of this run, which are freed at its end
    """

    def __init__(
        self,
        world: "Comm",
        hosts: list[int],
        device: str,
        connect: "Connect | None",
        over: Callable | None = None,
    ):
        MPI = load()
        self.world, self.messages = world, world.Dup()
        self.line = MPI.BYTE.Create_contiguous(LINE).Commit()
        self.made: list[Comm] = []
        mailbox = Mailbox()
        self.polling = Polling()
        mailbox.spins, mailbox.pace = SPINS, self.polling
        mailbox.polled = {
            rank: Source(self.messages, self.line, rank, MPI.Status())
            for rank in range(world.size)
            if rank != world.rank
        }
        self.sender = Sender(self.messages, self.line)
        host = world.Split(hosts[world.rank])
        self.here, memory = host.size, _memory_of(host)
        host.Free()
        connect = connect or self.connect
        connect = connect if over is None else partial(over, connect)
        self.fabric = Fabric(
            Place(world.rank, world.size, device, hosts, connect),
            mailbox,
            memory,
            None,
            self.sender.deliver,
        )

    def connect(
        self, fabric: Fabric, new: NewGroup, parent: Communicator | None
    ) -> Communicator | None:
        """Return a communicator of MPI; for a group within a host, one of shared memory."""
        if new.within_host or isinstance(parent, SharedMemoryCommunicator):
            return SharedMemoryCommunicator.connect(fabric, new, parent)
        if parent is None:  # of this run alone: what a failed run left must not pair with it
            comm = self.world.Dup()
        else:
            assert isinstance(parent, MpiCommunicator)
            parent.meet(signature_of("split"))  # so that all come to what follows
            if not new.members:
                parent.comm.Split(load().UNDEFINED)
                return None
            comm = parent.comm.Split(new.members[0], new.members.index(fabric.rank))
        self.made.append(comm)
        return MpiCommunicator(fabric, new, comm, self.polling)

    def free_groups(self) -> None:
        """Free the communicators of this run's groups: MPI has room for some thousands."""
        while self.made:
            self.made.pop().Free()

    def free(self) -> None:
        """Free all that this rank has of MPI; no transfer may be under way."""
        self.fabric.close()
        self.free_groups()
        self.messages.Free()
        self.world.Free()
        self.line.Free()


def hosts_of(comm: "Comm") -> list[int]:
    """Return the number of every process's host; all processes call this.

    The processes of a host share memory, and see each other under /proc. Two containers do not, and
    count as two hosts; without /proc every process counts as a host of its own.
    """
    host = comm.Split_type(load().COMM_TYPE_SHARED)
    first_here, processes = host.bcast(comm.rank), Path("/proc/self/ns/pid")
    host.Free()
    seen = os.readlink(processes) if processes.exists() else comm.rank
    return numbered(comm.allgather((first_here, seen)), comm.size)


def _memory_of(host: "Comm") -> SharedMemory:
    """Return memory that the ranks of this host share: a nameless file of the first of them.

    The others open it under /proc. So there is no name that a killed rank could leave behind.
    """
    file = create_file(host.size) if host.rank == 0 else -1
    pid, number = host.bcast((os.getpid(), file))
    if host.rank:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    mapped = mmap.mmap(file, 0)
    host.Barrier()  # the first rank keeps its file open until all have opened it
    os.close(file)
    return SharedMemory(mapped, host.rank, host.size)
