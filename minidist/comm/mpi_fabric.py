"""The rank of a process that `mpiexec` has started: its fabric, and how it makes communicators.

It is the fabric of a local rank. Its messages come from MPI. MPI cannot wake a thread, so a thread
that waits polls. Its memory is shared by the ranks of its host.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.comm.diagnosis import signature_of
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

    So a short wait ends soon after its event, and a long one leaves the core to others.
    """

    def __init__(self):
        self.begin = time.monotonic()

    def __call__(self, longest: float = LONGEST_PAUSE) -> None:
        time.sleep(min((time.monotonic() - self.begin) / 10, longest))


class Polling:
    """How threads of this rank wait; see `Pace` in mailbox.py.

    stopped_everywhere  set when no rank starts anything more in the present run
    """

    def __init__(self):
        self.stopped_everywhere = threading.Event()

    def offer(self) -> None:
        """No other rank has to go first."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        pause = Pause()
        while not condition():
            pause()
        return True


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
        world: "MPI.Comm",
        hosts: list[int],
        device: str,
        connect: Connect | None,
        over: Callable | None = None,
    ):
        connect = connect or self.connect
        MPI = load()
        self.world, self.messages = world, world.Dup()
        self.line = MPI.BYTE.Create_contiguous(LINE).Commit()
        self.made: list[MPI.Comm] = []
        mailbox = Mailbox()
        self.polling = Polling()
        mailbox.spins, mailbox.pace = SPINS, self.polling
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
            connect if over is None else partial(over, connect),
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
        """Return a communicator of MPI; for a group within a host, one of shared memory."""
        if within_host or isinstance(parent, SharedMemoryCommunicator):
            return SharedMemoryCommunicator.connect(fabric, members, splits, parent)
        if parent is not None:
            parent.meet(signature_of("split", (), None))  # so that all come to what follows
        if not members:
            parent.comm.Split(load().UNDEFINED)
            return None
        if parent is None:  # of this run alone: what a failed run left must not pair with it
            comm = self.world.Dup()
        else:
            comm = parent.comm.Split(members[0], members.index(fabric.rank))
        self.made.append(comm)
        return MpiCommunicator(fabric, members, splits, comm)

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


def hosts_of(comm: "MPI.Comm") -> list[int]:
    """Return the number of every process's host; all processes call this.

    The processes of a host share memory, and see each other under /proc. Two containers do not, and
    count as two hosts; without /proc every process counts as a host of its own.
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
    host.Barrier()  # the first rank keeps its file open until all have opened it
    os.close(file)
    return SharedMemory(mapped, host.rank, host.size)
