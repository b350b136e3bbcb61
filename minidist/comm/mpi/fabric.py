"""The rank of a process that `mpiexec` has started: its fabric, and how it makes communicators.

It is the fabric of a local rank. Its messages come from MPI. MPI cannot wake a thread, so a thread
that waits polls. Its memory is shared by the ranks of its host.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minidist.comm.diagnosis import signature_of
from minidist.comm.fabric import Communicator, Connect, NewGroup
from minidist.comm.local.mailbox import Mailbox
from minidist.comm.local.mailbox_fabric import MailboxFabric
from minidist.comm.local.shared_memory import SharedMemory, create_file
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.local.wiring import Place, Wiring, numbered
from minidist.comm.mpi.communicator import MpiCommunicator
from minidist.comm.mpi.library import load
from minidist.comm.mpi.messages import LINE, Sender, Source
from minidist.comm.mpi.polling import SPINS, Polling

if TYPE_CHECKING:
    from mpi4py.MPI import Comm


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
        connect: "Connect[MailboxFabric] | None",
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
        self.sender = Sender(self.messages, self.line, mailbox)
        host = world.Split(hosts[world.rank])
        self.here, memory = host.size, _memory_of(host)
        host.Free()
        connect = connect or self.connect
        connect = connect if over is None else partial(over, connect)
        self.fabric = MailboxFabric(
            Place(world.rank, world.size, device, hosts, connect),
            Wiring(mailbox, memory, None, self.sender.deliver, SPINS),
        )

    def connect(
        self, fabric: MailboxFabric, new: NewGroup, parent: Communicator | None
    ) -> Communicator | None:
        """Return a communicator of MPI; for a group within a host, one of shared memory."""
        if new.within_host or isinstance(parent, SharedMemoryCommunicator):
            return SharedMemoryCommunicator.connect(fabric, new, parent)
        if parent is None:  # of this run alone: what a failed run left must not pair with it
            comm = self.world.Dup()
        else:
            assert isinstance(parent, MpiCommunicator)
            parent.meet(signature_of("split", (), None))  # so that all come to what follows
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
