"""What travels between ranks, who counts it, and what a communicator has to do.

    Group          checks arguments, numbers messages, and calls the two below: group.py
    Communicator   one per group and rank: compares what the ranks call, and moves the arrays of
                   collectives, where it can do that better than messages
    Fabric         one per rank: messages, memory, and who waits for whom: fabric.py

There are `SharedMemoryCommunicator`, for arrays in memory that all ranks of a machine see, on the
host or on GPUs; `MpiCommunicator`, for ranks of several machines; and `NcclCommunicator`, over one
of these two, for ranks with a GPU each. A new one is a file of its own and a row of `TRANSPORTS` in
cluster.py; tests/comm/conformance tests what it has to do, and holds all of them to one that is
made of messages alone (tests/comm/message_communicator.py).
"""

import marshal
from collections import Counter
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from minidist.backend import Array, float_dtype, on_gpu, to_host
from minidist.comm.diagnosis import Signature
from minidist.pieces import split_sizes

BY_FORMULA = " (by formula)"


class Key(NamedTuple):
    """The queue that a message belongs to; messages of one source and one key keep their order.

    run     the number of the run
    group   the splits that made the group, () for the group of all ranks
    kind    "message" for send and recv, "collective" for what a collective sends
    number  the tag of a message, or which collective of its group this is
    """

    run: int
    group: tuple[int, ...]
    kind: str
    number: int


# An array, and whether the sender had it on a GPU. Between processes it is on the host.
Message = tuple[Array, bool]


# What is sent before the elements: the key, whether they were on a GPU, dtype and shape.
Head = tuple[Key, bool, np.dtype, tuple[int, ...]]


def pack_head(head: Head) -> bytes:
    """Return the head of a message for another process."""
    key, was_on_gpu, dtype, shape = head
    name = dtype.str if dtype.kind != "V" else dtype.name  # `.str` of bfloat16 is "V2"
    return marshal.dumps((*key, was_on_gpu, name, shape))


def unpack_head(packed: bytes | memoryview) -> Head:
    *key, was_on_gpu, name, shape = marshal.loads(packed)
    dtype = float_dtype(name) if name == "bfloat16" else np.dtype(name)
    return Key(*key), was_on_gpu, dtype, shape


class Staged:
    """An array of a GPU, and its copy on the host, which the first of several sends makes."""

    def __init__(self, array: Array):
        self.array, self.nbytes = array, array.nbytes

    @cached_property
    def host(self) -> np.ndarray:
        return to_host(self.array)

    def copy(self) -> Array:
        return self.array.copy()


def staged(array: Array) -> Array | Staged:
    """Return an array to be sent to several ranks, unchanged until the last send."""
    return Staged(array) if on_gpu(array) else array


class Ledger:
    """Payload bytes that other ranks take from this one, per operation.

    Control traffic does not count, nor does what a rank gives to itself. Bytes are counted where
    they are handed over. Where a library moves them unseen, as MPI and NCCL do, they are computed
    by their closed form; the name of the row then ends in BY_FORMULA, since it proves nothing about
    bytes.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def add_unseen(self, operation: str, nbytes: int) -> None:
        """Add bytes that a library has moved unseen: they are computed, not counted."""
        if nbytes:
            self.bytes[operation + BY_FORMULA] += nbytes

    def as_one(self, name: str) -> Counter[str]:
        """Return the bytes that were counted as one row, and those by formula as another one."""
        rows: Counter[str] = Counter()
        for row, nbytes in self.bytes.items():
            rows[name + BY_FORMULA if row.endswith(BY_FORMULA) else name] += nbytes
        return rows

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"


def all_reduce_bytes(elements: int, itemsize: int, me: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all_reduce in which each rank reduces one slice."""
    mine = split_sizes(elements, ranks)[me]
    return (elements - mine + (ranks - 1) * mine) * itemsize


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
        group; the messages of the call have the same `key` and `operation`.
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
