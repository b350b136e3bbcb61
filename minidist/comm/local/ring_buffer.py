"""Messages between two processes: small ones in memory that both see, others through a socket.

    SENT TAIL | HEAD | ASLEEP | records      8-byte words in lines of their own, then CAPACITY bytes
    a record:  number of the message, length, which head | bytes of the array
               0, length, which head                     | the head itself, before its first message
               0, length, ONWARD                         | nothing: the next one is at the beginning

The sender appends records at the tail, the receiver takes them at the head. Neither writes a word
that the other one writes (but for ASLEEP), so no lock between them is needed. A message that is
large or finds no room goes through a socket. All messages of the pair are numbered, so that the
receiver puts both ways into one order again. x86-64 promises that a store is seen after all stores
before it: the words that announce a record come after its bytes. Other processors promise less, so
ring buffers are not used there, and all messages go through sockets.

Fast path: skip this file at first reading.
"""

import struct
import threading
from collections import deque
from multiprocessing.connection import Connection

import numpy as np

from minidist.comm.communicator import Head, Key, Message, pack_head, unpack_head
from minidist.comm.local.shared_memory import LINE, SharedMemory

SENT, TAIL, HEAD, ASLEEP = 0, 1, LINE // 8, 2 * LINE // 8
RECORDS = 3 * LINE  # bytes before the first record
CAPACITY = 1 << 18  # bytes of records
NBYTES = RECORDS + CAPACITY  # of a whole buffer
LARGEST = CAPACITY // 4  # bytes of the largest array that is worth two copies
LABEL = struct.Struct("QII")  # of a record
HEADS = 1 << 10  # heads (key, on a GPU?, dtype, shape) that both ends remember by a number
WIDEST = 1 << 16  # bytes of a head
ONWARD = HEADS  # no head's number


def padded(nbytes: int) -> int:
    """Round up to whole labels, so that at the end there is room for one, or none at all."""
    return -(-nbytes // LABEL.size) * LABEL.size


class _End:
    """What both ends of the buffer at `start` have; the memory is zeros at first.

    count  messages that have passed this end, in the buffer or through the socket
    """

    def __init__(self, memory: SharedMemory, start: int):
        shared = memoryview(memory.map)[start : start + NBYTES]
        self.words, self.records = shared[:RECORDS].cast("Q"), shared[RECORDS:]
        self.count = self.head = self.tail = 0
        self._lock = threading.Lock()

    def _fence(self) -> None:
        """Let no store from before pass a load from after: locking is more than a plain store."""
        self._lock.acquire()
        self._lock.release()


class RingBufferWriter(_End):
    """The sender's end; one thread at a time.

    numbers  {head: its number, and the length of its records}
    room     bytes that are free from the tail on, at least
    """

    def __init__(self, memory: SharedMemory, start: int):
        super().__init__(memory, start)
        self.numbers: dict[Head, tuple[int, int]] = {}
        self.room = 0

    def put(self, key: Key, message: Message) -> bool:
        """Append a message and count it; False if it is to go through the socket instead."""
        array, was_on_gpu = message
        head = key, was_on_gpu, array.dtype, array.shape
        self.count += 1
        known = self.numbers.get(head) or self._introduce(head, array.nbytes)
        fits = known is not None and self._append(self.count, *known, array.tobytes())
        self.words[SENT] = self.count  # last, and before a socket, which takes longer, is used
        return fits

    def _append(self, number: int, which: int, length: int, written: bytes) -> bool:
        """Write a record if there is room."""
        if length > self.room and not self._make_room(length):
            return False
        place = self.tail % CAPACITY
        LABEL.pack_into(self.records, place, number, length, which)
        body = place + LABEL.size
        self.records[body : body + len(written)] = written
        self.room -= length
        self.words[TAIL] = self.tail = self.tail + length
        return True

    def _make_room(self, length: int) -> bool:
        """See how far the reader has come; go to the beginning if the end is too near."""
        place = self.tail % CAPACITY
        free, ahead = CAPACITY - self.tail + self.words[HEAD], CAPACITY - place
        if length > ahead:
            if ahead + length > free:
                return False
            LABEL.pack_into(self.records, place, 0, ahead, ONWARD)
            self.tail += ahead
            free, ahead = free - ahead, CAPACITY
        self.room = min(free, ahead)
        return length <= self.room

    def _introduce(self, head: Head, nbytes: int) -> tuple[int, int] | None:
        """Give a head a number that means it from now on; None if its messages do not fit."""
        if nbytes > LARGEST:
            return None
        written = pack_head(head)
        if len(written) > WIDEST:
            return None
        if len(self.numbers) == HEADS:
            self.numbers.clear()
        which = len(self.numbers)
        if not self._append(0, which, padded(LABEL.size + len(written)), written):
            return None
        return self.numbers.setdefault(head, (which, padded(LABEL.size + nbytes)))

    def must_wake(self) -> bool:
        """Return whether the receiver sleeps and nobody wakes it yet; then the caller must."""
        with self._lock:  # a fence, else both might miss the other: we its sleep, it our record
            sleeps = self.words[ASLEEP]
        if sleeps:
            self.words[ASLEEP] = 0
        return sleeps != 0


class RingBufferReader(_End):
    """The receiver's end: a `Polled`, see fabric.py; it is given what came through the socket."""

    def __init__(self, memory: SharedMemory, start: int):
        super().__init__(memory, start)
        self.heads: dict[int, Head] = {}
        self.from_socket: deque[tuple[Key, Message]] = deque()

    def has_pending(self, checks: int = 1) -> bool:
        words, head, count = self.words, self.head, self.count
        for _ in range(checks):
            if words[TAIL] != head or words[SENT] != count:
                return True
        return False

    def poll(self) -> tuple[Key, Message] | None:
        late = len(self.from_socket)  # read first: what was sent before it is then in the buffer
        while self.words[TAIL] != self.head:
            place = self.head % CAPACITY
            number, length, which = LABEL.unpack_from(self.records, place)
            body = place + LABEL.size
            if number == self.count + 1:
                key, was_on_gpu, dtype, shape = self.heads[which]
                array = np.ndarray(shape, dtype, self.records, body).copy()
                self.count = number
                self.words[HEAD] = self.head = self.head + length
                return key, (array, was_on_gpu)
            if number:
                break
            if which != ONWARD:
                self.heads[which] = unpack_head(self.records[body : place + length])
            self.words[HEAD] = self.head = self.head + length
        if not late:
            return None
        self.count += 1
        return self.from_socket.popleft()

    def request_wake_up(self) -> None:
        self.words[ASLEEP] = 1
        self._fence()


WAKE_UP = b""  # in place of a head


def wake_up(connection: Connection) -> None:
    """Tell the other end that there is a message in the ring buffer."""
    connection.send_bytes(WAKE_UP)


def write_message(connection: Connection, key: Key, message: Message) -> None:
    """Send the head, and then the bytes of the array."""
    array, was_on_gpu = message
    connection.send_bytes(pack_head((key, was_on_gpu, array.dtype, array.shape)))
    connection.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_message(connection: Connection) -> tuple[Key, Message] | None:
    """Return the (key, message) that was sent, or None for a call to wake up."""
    head = connection.recv_bytes()
    if head == WAKE_UP:
        return None
    key, was_on_gpu, dtype, shape = unpack_head(head)
    array = np.empty(shape, dtype)
    connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
    return key, (array, was_on_gpu)
