"""What a Group needs of a machine: two protocols. Strategies know neither of them.

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
from typing import NoReturn, Protocol

import numpy as np

from minidist.backend import Array
from minidist.comm.diagnosis import Signature, Wait
from minidist.comm.ledger import Ledger
from minidist.comm.message import Key, Staged
from minidist.events import EventLog


class Communicator(Protocol):
    """What moves the arrays of one group's collectives. All ranks of the group call it alike.

    Each method first compares `signature` among the ranks, before any array moves; if they differ,
    it raises CollectiveMismatch on every rank. A method that returns None has only compared: the
    arrays, on all ranks alike, are then left to the algorithms of collectives.py.

    ledger     payload bytes that this rank sends, counted where they are handed over; the
               messages of the group are counted here, too
    transfers  whether it has `transfer`; messages do without
    """

    ledger: Ledger
    transfers: bool

    def meet(self, signature: Signature) -> None:
        """Return when every rank of the group has come with this signature."""

    def all_reduce(
        self, signature: Signature, x: Array, op: str, out: Array | None
    ) -> Array | None:
        """Return the reduction of every rank's x; `out` itself if the result is there.

        In rank order, except where a library chooses the order, as MPI does: not of 16-bit floats.
        """

    def reduce_scatter(
        self, signature: Signature, x: Array, ends: list[int], op: str
    ) -> Array | None:
        """Return, on rank r, rows [ends[r], ends[r + 1]) of the reduction, in the same order."""

    def gather_into(self, signature: Signature, out: Array, ends: list[int]) -> Array | None:
        """Let rank r write its elements [ends[r], ends[r + 1]) of `out` into every rank's."""

    def transfer(
        self, key: Key, operation: str, outgoing: dict[int, Array | Staged], sources: list[int]
    ) -> dict[int, Array]:
        """Give each array to its rank; return, by rank, the fresh one that each source gives.

        It does not compare: the ranks have met, and all call this. They are numbered as in the
        group; `key` and `operation` are those of the call's messages.
        """


class Fabric(Protocol):
    """One rank's end of what connects the ranks of a run; the transport makes it.

    rank, size  this rank's number among all ranks, and their number
    hosts       the number of every rank's host, by first appearance: 0, 0, 1, 0, ...
    device      "cpu", "gpu" or "gpu:N": where `empty` allocates
    run         the number of the run
    reordered   whether, in this run, a library has added up in an order of its own that may show:
                see `order_shows` in collectives.py. A communicator sets it
    log         None, or this rank's EventLog
    """

    rank: int
    size: int
    hosts: list[int]
    device: str
    run: int
    reordered: bool
    log: EventLog | None

    def communicator(
        self,
        members: list[int],
        splits: tuple[int, ...],
        parent: Communicator | None,
        within_host: bool = False,
    ) -> Communicator | None:
        """Return the communicator of a new group of these ranks; all ranks of the parent call this.

        members      in the order of the group; empty for a rank that joins none: then return None
        splits       the name of the group, which no other group of these ranks has: see Key
        parent       the communicator of the group that is split; None for the group of all ranks
        within_host  whether the members are on one host, and reduce in the memory they share
        """

    def send(self, to: int, key: Key, array: Array) -> None:
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

    def in_place(self, array: Array | None) -> bool:
        """Return whether an array is from `empty`, or is a contiguous part of such an array."""

    def waiting(self, wait: Wait) -> AbstractContextManager[None]:
        """Record, while in this context, that the thread waits."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise `error`, and in every thread of this rank that communicates; the run fails."""


Connect = Callable[
    [Fabric, list[int], tuple[int, ...], Communicator | None, bool], Communicator | None
]  # how a transport chooses communicators: Fabric.communicator, given the fabric
