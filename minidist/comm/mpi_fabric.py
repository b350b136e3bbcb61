"""The rank of a process that `mpiexec` has started: its fabric, and how it makes communicators.

It is the fabric of a local rank, with a mailbox that is filled by MPI and polled by whoever waits,
since MPI cannot wake a thread. Its memory is shared by the ranks of its host.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.comm.fabric import Communicator, Connect
from minidist.comm.mailbox import Mailbox
from minidist.comm.mailbox_fabric import MailboxFabric, numbered
from minidist.comm.mpi import load
from minidist.comm.mpi_communicator import MpiCommunicator
from minidist.comm.mpi_messages import LINE, Sender, Source
from minidist.comm.shared_memory import SharedMemory, create_file
from minidist.comm.shared_memory_communicator import SharedMemoryCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 300  # how often a rank checks for the others, and yields its core, before it pauses
LONGEST_PAUSE = 0.001  # seconds


class Pause:
    """Pauses between two checks: a tenth of the time since the last event.

    So they are short where a rank waits briefly, and take no time of others where it waits long.
    """

    def __init__(self):
        self.begin = time.monotonic()

    def __call__(self) -> None:
        time.sleep(min((time.monotonic() - self.begin) / 10, LONGEST_PAUSE))


class Polling:
    """How threads of this rank wait; see `Pace` in mailbox.py."""

    def offer(self) -> None:
        """No other rank has to go first."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        pause = Pause()
        while not condition():
            pause()
        return True


class MpiRank:
    """This process's rank among those of `world`; all of them make theirs at once.

    hosts    the number of every rank's host
    connect  how to choose communicators; MPI's own if None
    here     how many ranks are on this rank's host
    """

    def __init__(self, world: "MPI.Comm", hosts: list[int], device: str, connect: Connect | None):
        MPI = load()
        self.world, self.messages = world, world.Dup()
        self.line = MPI.BYTE.Create_contiguous(LINE).Commit()
        self.made: list[MPI.Comm] = []  # in this run, for its groups
        mailbox = Mailbox()
        mailbox.spins, mailbox.pace = SPINS, Polling()
        mailbox.polled = {
            rank: Source(self.messages, self.line, rank, MPI.Status())
            for rank in range(world.size)
            if rank != world.rank
        }
        self.sender = Sender(self.messages, self.line, mailbox)
        host = world.Split(hosts[world.rank])
        self.here, memory = host.size, _memory_of(host)
        host.Free()
        self.fabric = MailboxFabric(
            world.rank,
            world.size,
            device,
            mailbox,
            memory,
            None,
            SPINS,
            self.sender.deliver,
            connect or self.connect,
            hosts=hosts,
        )

    def connect(
        self,
        fabric: MailboxFabric,
        members: list[int],
        splits: tuple[int, ...],
        parent: Communicator | None,
        within_host: bool = False,
    ) -> Communicator | None:
        """Return a communicator of MPI; for a group within a host, one of its memory."""
        if within_host or isinstance(parent, SharedMemoryCommunicator):
            return SharedMemoryCommunicator.connect(fabric, members, splits, parent)
        if not members:
            parent.comm.Split(load().UNDEFINED)
            return None
        if parent is None:  # each run has its own, lest what one has left pairs with the next one's
            comm = self.world.Dup()
        else:
            comm = parent.comm.Split(members[0], members.index(fabric.rank))
        self.made.append(comm)
        return MpiCommunicator(fabric, members, splits, comm)

    def free_groups(self) -> None:
        """Return to MPI what the groups of this run have used: it has room for some thousands."""
        while self.made:
            self.made.pop().Free()

    def free(self) -> None:
        """Return the rest to MPI, when no transfer is under way."""
        self.free_groups()
        self.messages.Free()
        self.world.Free()
        self.line.Free()


def hosts_of(comm: "MPI.Comm") -> list[int]:
    """Return the number of the host of every process.

    The processes of a host share memory, and see each other under /proc. Where they do not, as in
    two containers, or without /proc, each counts as a host of its own.
    """
    host = comm.Split_type(load().COMM_TYPE_SHARED)
    first_here, processes = host.bcast(comm.rank), Path("/proc/self/ns/pid")
    host.Free()
    seen = os.readlink(processes) if processes.exists() else comm.rank
    return numbered(comm.allgather((first_here, seen)), comm.size)


def _memory_of(host: "MPI.Comm") -> SharedMemory:
    """Return memory that the ranks of this host share: a nameless file of the first of them.

    The others open it under /proc. So there is no name that a killed rank could leave behind.
    """
    file = create_file(host.size) if host.rank == 0 else -1
    pid, number = host.bcast((os.getpid(), file))
    if host.rank:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    mapped = mmap.mmap(file, 0)
    host.Barrier()  # the first one's file is open until all have it
    os.close(file)
    return SharedMemory(mapped, host.rank, host.size)
