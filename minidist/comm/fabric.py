"""What a Group needs of a machine: a Communicator and a Fabric. Strategies know neither.

    Group          checks arguments, numbers messages, and calls the two below
    Communicator   one per group and rank: compares what the ranks call, and moves the arrays of
                   collectives, where it can do that better than messages
    Fabric         one per rank: messages, memory, and who waits for whom

What there is: `MailboxFabric`, whose messages a transport delivers, and whose memory is shared
with the other ranks of its machine; `SharedMemoryCommunicator`, for arrays in that memory, on the
host or on GPUs; `MpiCommunicator`, for ranks of several machines; `NcclCommunicator`, over one of
these two, for ranks with a GPU each; `MessageCommunicator`, which works on every fabric. A new
fabric or communicator is a file of its own and a row of `TRANSPORTS` in cluster.py;
tests/comm/conformance tests what it has to do.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from minidist.backend import Array
from minidist.comm.diagnosis import Signature, Wait
from minidist.comm.ledger import Ledger
from minidist.comm.message import Key, Staged
from minidist.events import EventLog


class Messages(Protocol):
    """The messages of one collective call, which the algorithms of collectives.py are written on.

    rank, size  this rank's number in the group, and how many ranks it has
    """

    rank: int
    size: int

    def send(self, array: Array, to: int) -> None:
        """Send a copy; never wait."""

    def recv(self, source: int) -> Array:
        """Return the next array from this rank, which is fresh."""


class Transfers(Protocol):
    """A library that moves arrays from rank to rank, as NCCL does."""

    def transfer(
        self, key: Key, operation: str, outgoing: dict[int, Array | Staged], sources: list[int]
    ) -> dict[int, Array]:
        """Give each array to its rank; return, by rank, the fresh one that each source gives.

        It does not compare: the ranks have met, and all call this. They are numbered as in the
        group; `key` and `operation` are those of the call's messages.
        """


class Communicator(Protocol):
    """What moves the arrays of one group's collectives. All ranks of the group call it alike.

    Each method first compares `call`, its signature, among the ranks, before any array moves; if
    they differ, it raises CollectiveMismatch on every rank. A method that returns None has only
    compared: the arrays, on all ranks alike, are then left to the algorithms of collectives.py.

    members  the ranks' numbers in the world
    ledger   payload bytes that this rank sends, counted where they are handed over; the messages
             of the group are counted here, too
    library  what moves the arrays of other collectives; None: messages do
    """

    members: list[int]
    ledger: Ledger

    @property
    def library(self) -> "Transfers | None": ...

    def meet(self, call: Signature) -> None:
        """Return when every rank of the group has come with this signature."""

    def exchange(self, number: int) -> list[int]:
        """Return the number that each rank has given, in the order of the group."""

    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> Array | None:
        """Return the reduction of every rank's x; `out` itself if the result is there.

        In rank order, except where a library chooses the order, as MPI does: not of 16-bit floats.
        """

    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> Array | None:
        """Return, on rank r, rows [ends[r], ends[r + 1]) of the reduction, in the same order."""

    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> Array | None:
        """Let rank r write its elements [ends[r], ends[r + 1]) of `out` into every rank's."""


class NewGroup(NamedTuple):
    """A group that is being made.

    members      the ranks' numbers in the world, in the order of the group; empty for a rank that
                 joins none
    splits       the name of the group, which no other group of these ranks has: see Key
    within_host  whether the members are on one host, and reduce in the memory they share
    """

    members: list[int]
    splits: tuple[int, ...]
    within_host: bool = False


def order_shows(dtype: np.dtype, ranks: int) -> bool:
    """Return whether the order in which this number of ranks is added up may change the bits.

    Whole numbers are exact in any order, and two numbers have one sum.
    """
    return dtype.kind not in "biu" and ranks > 2


class Fabric(Protocol):
    """One rank's end of what connects the ranks of a run; the transport makes it.

    rank, size  this rank's number among all ranks, and their number
    hosts       the number of every rank's host, by first appearance: 0, 0, 1, 0, ...
    device      "cpu", "gpu" or "gpu:N": where `empty` allocates
    run         the number of the run
    reordered   whether, in this run, a library has added up in an order of its own that may show:
                see `order_shows`. A communicator sets it
    log         None, or this rank's EventLog
    """

    rank: int
    size: int
    hosts: list[int]
    device: str
    run: int
    reordered: bool
    log: EventLog | None

    def communicator(self, new: NewGroup, parent: Communicator | None) -> Communicator | None:
        """Return the communicator of a new group; None for a rank that joins none.

        parent  the communicator of the group that is split, all of whose ranks call this; None for
                the group of all ranks
        """

    def send(self, to: int, key: Key, array: Array | Staged) -> None:
        """Send a copy. Never wait for the receiver; `array` may be written to right after.

        array  an array, or the `staged(array)` of message.py, which several sends share
        """

    def recv(self, sources: list[int], key: Key, operation: str) -> tuple[int, Array]:
        """Return (source, array): the oldest message of `key`; wait for it if need be.

        The array is fresh, and on the sender's kind of device. Where several sources have one, it
        is from the first of them in the list. A table of waits shows `operation`.
        """

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised array where the communicators need not copy it."""

    def use_device(self) -> None:
        """Let this thread use the rank's GPU; a thread of CuPy begins with the first one.

        On "gpu" the n-th rank of a host uses the GPU n modulo their number.
        """

    def in_place(self, array: Array) -> bool:
        """Return whether an array is from `empty`, or is a contiguous part of such an array."""

    def waiting(self, wait: Wait) -> AbstractContextManager[None]:
        """Record, while in this context, that the thread waits."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise `error`, and in every thread of this rank that communicates; the run fails."""


F = TypeVar("F", bound=Fabric)
# How a transport chooses communicators: Fabric.communicator, given the transport's own fabric.
Connect = Callable[[F, NewGroup, Communicator | None], Communicator | None]
