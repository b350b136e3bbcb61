"""Ring buffer: small messages from one rank to one other, in memory that both see.

    SENT TAIL | HEAD | ASLEEP | records      8-byte words in lines of their own, then CAPACITY bytes
    a record:  number, length, width of the head, which head | head, if new | bytes of the array

The sender appends records at the tail, the receiver takes them at the head. Neither writes a word
that the other one writes (but for ASLEEP), so no lock between them is needed. A message that is
large or finds no room goes through a socket. All messages of the pair are numbered, so that the
receiver puts both ways into one order again. x86-64 promises that a store is seen after all stores
before it: the words that announce a record come after its bytes. Other processors promise less, so
ring buffers are not used there, and all messages go through sockets.

Fast path: skip this file at first reading.
"""

import marshal
import struct
import threading
from collections import deque

import numpy as np

from minidist.comm.local.shared_memory import LINE, SharedMemory
from minidist.comm.message import Key, Message, dtype_of, make_tuple, name_of

SENT, TAIL, HEAD, ASLEEP = 0, 1, LINE // 8, 2 * LINE // 8
RECORDS = 3 * LINE  # bytes before the first record
CAPACITY = 1 << 18  # bytes of records
NBYTES = RECORDS + CAPACITY  # of a whole buffer
LARGEST = CAPACITY // 4  # bytes of the largest array that is worth two copies
LABEL = struct.Struct("QIHH")  # of a record
WIDEST = (1 << 16) - 1  # bytes of a head
HEADS = 1 << 10  # heads (key, on a GPU?, dtype, shape) that both ends remember by a number
ONWARD = 0  # the number of a record that is no message: the next one is at the beginning

Head = tuple[Key, bool, np.dtype, tuple[int, ...]]


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
    """The sender's end; one thread at a time."""

    def __init__(self, memory: SharedMemory, start: int):
        super().__init__(memory, start)
        self.numbers: dict[Head, int] = {}

    def put(self, key: Key, message: Message) -> bool:
        """Append a message and count it; False if it is to go through the socket instead."""
        array, was_on_gpu = message
        self.count += 1
        fits = array.nbytes <= LARGEST and self._append(
            (key, was_on_gpu, array.dtype, array.shape), array
        )
        self.words[SENT] = self.count  # last, and before a socket, which takes longer, is used
        return fits

    def _append(self, head: Head, array: np.ndarray) -> bool:
        """Write a record if there is room: to the end of the buffer, or else to its beginning."""
        which, written = self.numbers.get(head), b""
        if which is None:
            key, was_on_gpu, dtype, shape = head
            written = marshal.dumps((*key, was_on_gpu, name_of(dtype), shape))
        width, nbytes = len(written), array.nbytes
        if width > WIDEST:
            return False
        length = padded(LABEL.size + width + nbytes)
        place = self.tail % CAPACITY
        gap = CAPACITY - place if place + length > CAPACITY else 0
        tail = self.tail + gap + length
        if tail - self.head > CAPACITY:
            self.head = self.words[HEAD]
            if tail - self.head > CAPACITY:
                return False
        if gap:
            LABEL.pack_into(self.records, place, ONWARD, gap, 0, 0)
            place = 0
        body = place + LABEL.size + width
        if written:
            which = self._remember(head)
            self.records[place + LABEL.size : body] = written
        LABEL.pack_into(self.records, place, self.count, length, width, which)
        self.records[body : body + nbytes] = array.tobytes()
        self.words[TAIL] = self.tail = tail
        return True

    def _remember(self, head: Head) -> int:
        """Give a head a number that means it from now on; forget all heads when they are many."""
        if len(self.numbers) == HEADS:
            self.numbers.clear()
        return self.numbers.setdefault(head, len(self.numbers))

    def must_wake(self) -> bool:
        """Return whether the receiver sleeps and nobody wakes it yet; then the caller must."""
        self._fence()  # else both might miss the other: we its sleep, it our record
        sleeps = self.words[ASLEEP] != 0
        if sleeps:
            self.words[ASLEEP] = 0
        return sleeps


class RingBufferReader(_End):
    """The receiver's end: a `Polled`, see mailbox.py; it is given what came through the socket."""

    def __init__(self, memory: SharedMemory, start: int):
        super().__init__(memory, start)
        self.heads: dict[int, Head] = {}
        self.from_socket: deque[tuple[Key, Message]] = deque()

    def has_pending(self) -> bool:
        return self.words[SENT] != self.count

    def poll(self) -> tuple[Key, Message] | None:
        late = bool(self.from_socket)  # read first: what was sent before it is then in the buffer
        while self.words[TAIL] != self.head:
            place = self.head % CAPACITY
            number, length, width, which = LABEL.unpack_from(self.records, place)
            if number == ONWARD:
                self.head += length
                continue
            if number != self.count + 1:
                break
            body = place + LABEL.size + width
            if width:
                self._learn(which, self.records[place + LABEL.size : body])
            key, was_on_gpu, dtype, shape = self.heads[which]
            array = np.ndarray(shape, dtype, self.records, body).copy()
            self.count = number
            self.head += length
            self.words[HEAD] = self.head
            return key, make_tuple(Message, (array, was_on_gpu))
        if not late:
            return None
        self.count += 1
        return self.from_socket.popleft()

    def _learn(self, which: int, written: memoryview) -> None:
        run, group, kind, number, was_on_gpu, dtype, shape = marshal.loads(written)
        self.heads[which] = Key(run, group, kind, number), was_on_gpu, dtype_of(dtype), shape

    def request_wake_up(self) -> None:
        self.words[ASLEEP] = 1
        self._fence()
