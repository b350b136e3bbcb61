"""Ring buffer: small messages from one rank to one other, in memory that both see.

    SENT TAIL | HEAD | ASLEEP | records      8-byte words in lines of their own, then CAPACITY bytes
    a record:  number, length, width of the head, which head | head, if new | bytes of the array

The sender appends records at the tail, the receiver takes them at the head. Neither writes a word
that the other one writes (but for ASLEEP), so there is nothing to lock between them. What is large
or finds no room goes another way, through a socket; so that at the receiver both ways are one queue
again, all messages of the pair are numbered, and a record waits for its turn. That the bytes of a
record are there before the words that announce it is what x86-64 promises to plain stores:
elsewhere these rings are not used.
"""

import marshal
import struct
import threading

import numpy as np

from minidist.comm.message import Key, Message
from minidist.comm.shared_memory import LINE, SharedMemory

SENT, TAIL, HEAD, ASLEEP = 0, 1, LINE // 8, 2 * LINE // 8
RECORDS = 3 * LINE  # bytes before the first record
CAPACITY = 1 << 18  # bytes of records
RING = RECORDS + CAPACITY
LARGEST = CAPACITY // 4  # bytes of the largest array that is worth two copies
LABEL = struct.Struct("QIHH")  # of a record
WIDEST = (1 << 16) - 1  # bytes of a head
HEADS = 1 << 10  # heads (key, on a GPU?, dtype, shape) that both ends remember by a number
ONWARD = 0  # the number of what is no message: the next record lies at the beginning


def padded(nbytes: int) -> int:
    """Round up to whole labels, so that at the end there is room for one, or none at all."""
    return -(-nbytes // LABEL.size) * LABEL.size


class _End:
    """What both ends of the ring at `start` have; the memory is zeros at first.

    count  messages that have passed this end, in the ring or another way
    """

    def __init__(self, memory: SharedMemory, start: int):
        ring = memoryview(memory.map)[start : start + RING]
        self.words, self.records = ring[:RECORDS].cast("Q"), ring[RECORDS:]
        self.count = self.head = self.tail = 0
        self.heads: dict = {}
        self._lock = threading.Lock()

    def _fence(self) -> None:
        """Let no store from before pass a load from after: locking is more than a plain store."""
        self._lock.acquire()
        self._lock.release()


class RingWriter(_End):
    """The sender's end; one thread at a time."""

    def put(self, key: Key, message: Message) -> bool:
        """Append a message; False: it has to go another way, in its turn, and is counted."""
        array, was_on_gpu = message
        self.count += 1
        fits = array.nbytes <= LARGEST and self._append(
            (key, was_on_gpu, array.dtype, array.shape), array
        )
        self.words[SENT] = self.count  # last, and before a socket, which takes longer, is used
        return fits

    def _append(self, head: tuple, array: np.ndarray) -> bool:
        """Write a record if there is room: to the end of the ring, or else from its beginning."""
        which, written = self.heads.get(head), b""
        if which is None:
            key, was_on_gpu, dtype, shape = head
            written = marshal.dumps((*key, was_on_gpu, dtype.str, shape))
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

    def _remember(self, head: tuple) -> int:
        """Give a head a number that stands for it from now on; now and then all begin anew."""
        if len(self.heads) == HEADS:
            self.heads.clear()
        return self.heads.setdefault(head, len(self.heads))

    def must_wake(self) -> bool:
        """Say whether the receiver sleeps and nobody is to wake it yet; then its caller is."""
        self._fence()  # else both might miss the other: we its sleep, it our record
        sleeps = self.words[ASLEEP] != 0
        if sleeps:
            self.words[ASLEEP] = 0
        return sleeps


class RingReader(_End):
    """The receiver's end; one thread at a time takes, any may look."""

    def stirs(self) -> bool:
        """Say whether a message is in the ring, or on another way."""
        return self.words[SENT] != self.count

    def take(self) -> tuple[Key, Message] | None:
        """Return the next (key, message); None if it is not here: not sent, or not in the ring."""
        if self.words[TAIL] == self.head:
            return None
        place = self.head % CAPACITY
        number, length, width, which = LABEL.unpack_from(self.records, place)
        if number == ONWARD:
            self.head += length
            return self.take()
        if number != self.count + 1:
            return None
        body = place + LABEL.size + width
        if width:
            *key, was_on_gpu, dtype, shape = marshal.loads(self.records[place + LABEL.size : body])
            self.heads[which] = Key(*key), was_on_gpu, np.dtype(dtype), shape
        key, was_on_gpu, dtype, shape = self.heads[which]
        array = np.ndarray(shape, dtype, self.records, body).copy()
        self.count = number
        self.head += length
        self.words[HEAD] = self.head
        return key, Message(array, was_on_gpu)

    def pass_by(self) -> None:
        """Note that the next message has come, if not through the ring then another way."""
        self.count += 1

    def fall_asleep(self) -> None:
        """Ask to be woken by whoever sends next; look once more before sleeping indeed."""
        self.words[ASLEEP] = 1
        self._fence()
