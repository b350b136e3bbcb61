"""Where the ranks of one NCCL communicator meet in the stand-in: a thread, and a socket for each.

The process that makes the unique id has this thread; the id is its address. A rank sends what it
has enqueued, and waits for the results. The thread matches the calls. So what would hang on GPUs is
an error here: ranks that enqueue different things, or in another order, or that are gone.
"""

import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import reduce
from multiprocessing.connection import Connection, Listener, wait

import numpy as np

PATIENCE = 10.0  # seconds that a rank waits for the others
ID_BYTES = 128  # nccl.h: NCCL_UNIQUE_ID_BYTES
SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE = 2, 3, 4, 5, 6  # nccl.h: ncclResult_t
COMBINE = [np.add, np.multiply, np.fmax, np.fmin]  # nccl.h: ncclRedOp_t; fmax ignores NaN
DTYPES = "i1 u1 i4 u4 i8 u8 f2 f4 f8".split()  # nccl.h: ncclDataType_t

leaked: list[str] = []  # communicators of this process that were neither destroyed nor aborted
living = weakref.WeakSet()  # those that are open
calls: list[str] = []  # of this process, by name


class Refused(Exception):
    """What NCCL answers instead of a result: a status, and why."""


@dataclass
class Call:
    """What a rank has enqueued.

    name, spec  the method, and the arguments that must be the same on all ranks
    data        the bytes that it gives
    peer        the other rank of a send or recv
    result      the bytes that it gets, once it is done
    """

    name: str
    spec: tuple[int, ...]
    data: bytes = b""
    peer: int | None = None
    done: bool = False
    result: bytes = b""

    def __str__(self):
        return f"{self.name}{self.spec}" + ("" if self.peer is None else f" with {self.peer}")


@dataclass
class Rank:
    """A rank's connection, the calls that it waits for, and since when."""

    connection: Connection
    calls: list[Call] = field(default_factory=list)
    since: float = 0.0

    def left(self) -> list[Call]:
        return [call for call in self.calls if not call.done]

    def answer(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError:
            self.calls = []  # it is gone


class Root:
    """The thread's work: `ranks` are those that are connected, by number."""

    def __init__(self):
        self.listener = Listener(("127.0.0.1", 0))
        self.ranks: dict[int, Rank] = {}
        self.size = 1  # until a rank says more
        threading.Thread(target=self.work, daemon=True, name="nccl root").start()

    def unique_id(self) -> bytes:
        return "{} {} ".format(*self.listener.address).encode().ljust(ID_BYTES, b"\0")

    def work(self) -> None:
        arrived: list[Rank] = []
        try:
            self.gather(arrived)
            while self.ranks:
                self.read()
                while self.collective() or self.message():
                    self.reply()
                if self.ranks and all(rank.calls for rank in self.ranks.values()):
                    raise Refused(INTERNAL, f"this would hang: {self}")
        except Refused as error:
            for rank in arrived:
                rank.answer(error)
        for rank in arrived:
            rank.connection.close()
        self.listener.close()

    def gather(self, arrived: list[Rank]) -> None:
        """Accept every rank; refuse all if they do not fit (NCCL: init.cc, initTransportsRank)."""
        hellos = []
        while len(hellos) < self.size:
            arrived.append(Rank(self.listener.accept()))
            self.size, *hello = arrived[-1].connection.recv()
            hellos.append(hello)
        for rank, (number, gpu) in zip(arrived, hellos, strict=True):
            if number in self.ranks or not 0 <= number < self.size:
                raise Refused(ARGUMENT, f"rank {number} of {self.size} is none, or comes twice")
            self.ranks[number] = rank
            for other, its in hellos:
                if its == gpu and other < number:
                    raise Refused(
                        USAGE,
                        f"Duplicate GPU detected : rank {other} and rank {number} both on CUDA "
                        f"device {gpu}",
                    )
        for rank in arrived:
            rank.answer([])

    def read(self) -> None:
        """Take what has come; refuse if a rank waits for one that is gone, or for too long."""
        ready = wait([rank.connection for rank in self.ranks.values()], timeout=0.2)
        for number, rank in list(self.ranks.items()):
            if rank.connection in ready:
                try:
                    rank.calls, rank.since = rank.connection.recv(), time.monotonic()
                except (EOFError, OSError):
                    del self.ranks[number]
        waiting = [rank for rank in self.ranks.values() if rank.calls]
        if waiting and len(self.ranks) < self.size:
            raise Refused(REMOTE, f"a rank is gone: {self}")
        if any(time.monotonic() - rank.since > PATIENCE for rank in waiting):
            raise Refused(REMOTE, f"a rank has not come for {PATIENCE} s: {self}")

    def collective(self) -> bool:
        """Do the next collective, if all ranks have enqueued one; return whether."""
        ranks = [self.ranks[number] for number in sorted(self.ranks)]
        calls = [next((c for c in rank.left() if c.peer is None), None) for rank in ranks]
        if not calls or None in calls:
            return False
        if len({(call.name, call.spec) for call in calls}) > 1:
            raise Refused(INTERNAL, f"the ranks do not call the same: {self}")
        results = COLLECTIVES[calls[0].name]([call.data for call in calls], *calls[0].spec)
        for call, call.result in zip(calls, results, strict=True):
            call.done = True
        return True

    def message(self) -> bool:
        """Give what a rank sends to the first recv that waits for it; return whether."""
        for number, rank in self.ranks.items():
            for sent in [call for call in rank.left() if call.name == "send"]:
                other = self.ranks[sent.peer]
                for call in other.left():
                    if (call.name, call.peer) == ("recv", number):
                        if call.spec != sent.spec:
                            raise Refused(INTERNAL, f"{sent} meets {call}")
                        call.result, call.done, sent.done = sent.data, True, True
                        return True
        return False

    def reply(self) -> None:
        for rank in self.ranks.values():
            if rank.calls and not rank.left():
                rank.answer([call.result for call in rank.calls])
                rank.calls = []

    def __str__(self):
        rows = [
            f"rank {number}: {', '.join(map(str, rank.left())) or 'nothing'}"
            for number, rank in sorted(self.ranks.items())
        ]
        return "; ".join(rows)


# What the collectives do: from every rank's bytes to every rank's bytes.


def total(data: list[bytes], dtype: int, op: int) -> np.ndarray:
    """Reduce, in an order that is not the order of the ranks: NCCL promises none."""
    arrays = [np.frombuffer(given, DTYPES[dtype]) for given in [*data[1:], data[0]]]
    with np.errstate(all="ignore"):
        return reduce(COMBINE[op], arrays)


def reduced_on(root: int, data: list[bytes], dtype: int, op: int) -> list[bytes]:
    whole = total(data, dtype, op).tobytes()
    return [whole if rank == root else b"" for rank in range(len(data))]


def scattered(data: list[bytes], count: int, dtype: int, op: int) -> list[bytes]:
    return [piece.tobytes() for piece in total(data, dtype, op).reshape(len(data), count)]


COLLECTIVES = {
    "allReduce": lambda data, n, dtype, op: [total(data, dtype, op).tobytes()] * len(data),
    "reduce": lambda data, n, dtype, op, root: reduced_on(root, data, dtype, op),
    "reduceScatter": scattered,
    "allGather": lambda data, n, dtype: [b"".join(data)] * len(data),
    "broadcast": lambda data, n, dtype, root: [data[root]] * len(data),
}
