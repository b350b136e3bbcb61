"""What connects one rank to the others, for as long as it lives: values that a transport makes."""

import os
import select
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic

from minidist.comm.fabric import Connect, F
from minidist.comm.local.mailbox import Mailbox
from minidist.comm.local.shared_memory import SharedMemory
from minidist.comm.message import Key, Message
from minidist.errors import WrongInput


class Alarm:
    """How sleeping ranks are woken: a pipe for each. A rank sleeps when it has spun too long."""

    def __init__(self, reader: int, writers: list[int]):
        self.reader, self.writers = reader, writers
        for descriptor in (self.reader, *writers):
            os.set_blocking(descriptor, False)

    def sleep(self, seconds: float) -> None:
        """Wait until another rank calls `wake`, for at most this time."""
        poll = select.poll()  # not to be shared between threads
        poll.register(self.reader, select.POLLIN)
        if poll.poll(1000 * seconds):
            with suppress(BlockingIOError):  # another thread of this rank has read it
                os.read(self.reader, 4096)

    def wake(self, rank: int) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # its pipe is full of calls, or it is dead
            os.write(self.writers[rank], b"!")


@dataclass(frozen=True)
class Place(Generic[F]):
    """Which rank this is: the part of its wiring that can be sent to another process.

    device   "cpu", "gpu" or "gpu:N"
    hosts    the number of every rank's host
    connect  makes communicators, see Fabric.communicator
    """

    rank: int
    size: int
    device: str
    hosts: list[int]
    connect: Connect[F]


@dataclass(frozen=True)
class Wiring:
    """How a rank reaches the others.

    mailbox                    where its messages arrive
    memory                     its memory on the host, which the ranks of the host share
    alarm                      wakes the ranks of this machine; None if the mailbox has a pace
    deliver(to, key, message)  the transport's part of a send, by one thread at a time for each
                               rank; the array has been copied when it returns
    spins                      how often to check for the others before sleeping; 0: sleep at once,
                               as threads do, which share one interpreter
    own_process                whether the rank is a process, and not one thread of the caller's
    """

    mailbox: Mailbox
    memory: SharedMemory
    alarm: Alarm | None
    deliver: Callable[[int, Key, Message], None]
    spins: int
    own_process: bool = True


def numbered(hosts: Sequence[Hashable] | None, size: int) -> list[int]:
    """Return the number of each rank's host, by first appearance; all 0 if no host is named.

    ValueError unless there is one name for each of the `size` ranks.
    """
    if hosts is None:
        return [0] * size
    if len(hosts) != size:
        raise WrongInput(f"{len(hosts)} hosts are named for {size} ranks; name the host of each")
    names = list(dict.fromkeys(hosts))
    return [names.index(host) for host in hosts]
