"""Messages over MPI: one MPI message each, a header and the bytes of the array behind it.

    | length of the header | header, pickled: key, dtype, shape | payload, never pickled |
    | 8 bytes              | to a multiple of 64 bytes          | to a multiple of 64    |

It is copied once, into that form, and MPI sends it while the rank goes on (`Isend`). It is received
into memory of its own, of which the array is a view. MPI keeps the order of each source; the
mailbox finds the key. MPI may count in 32 bits, so a message is counted in lines of 64 bytes: it
has at most 2^37 bytes.
"""

import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.local.mailbox import Mailbox
from minidist.comm.message import Key, Message, dtype_of, name_of

if TYPE_CHECKING:
    from mpi4py import MPI

LINE = 64  # bytes
# Transfers that a failed run has left under way. MPI cannot end all of them, and may still write
# to their memory, so both are kept until the process ends.
ABANDONED: list[Any] = []


def pack(key: Key, message: Message) -> np.ndarray:
    """Return the bytes of a message, in whole lines; a copy."""
    array, was_on_gpu = message
    header = pickle.dumps((*key, was_on_gpu, name_of(array.dtype), array.shape))
    begin = _lines(8 + len(header)) * LINE
    packed = np.empty(begin + _lines(array.nbytes) * LINE, np.uint8)
    packed[:8].view(np.int64)[0] = len(header)
    packed[8 : 8 + len(header)] = np.frombuffer(header, np.uint8)
    if array.nbytes:
        packed[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return packed


def unpack(packed: np.ndarray) -> tuple[Key, Message]:
    """Return what was packed; the array is a view."""
    length = int(packed[:8].view(np.int64)[0])
    *key, was_on_gpu, dtype, shape = pickle.loads(packed[8 : 8 + length].data)
    begin, dtype = _lines(8 + length) * LINE, dtype_of(dtype)
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    array = packed[begin : begin + nbytes].view(dtype).reshape(shape)
    return Key(*key), (array, was_on_gpu)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE)


class Sender:
    """A fabric's `deliver`; it keeps the memory of sends that are under way."""

    def __init__(self, comm: "MPI.Comm", line: "MPI.Datatype", mailbox: Mailbox):
        self.comm, self.line, self.mailbox = comm, line, mailbox
        self.pending: list[MPI.Request] = []
        self.lock = threading.Lock()

    def deliver(self, to: int, key: Key, message: Message) -> None:
        if to == self.comm.rank:
            self.mailbox.put_copy(to, key, message)
            return
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
    """The messages of one rank; see `Polled` in mailbox.py."""

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
