"""A process that is a rank: its main thread works, a second thread reads all that arrives, at once.

So a send never waits for a recv. process_transport.py, which starts it, has the picture.
"""

import mmap
import os
import pickle
import platform
import queue
import selectors
import signal
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from minidist.backend import keep_freed_memory
from minidist.comm.diagnosis import Snapshot
from minidist.comm.local.fork_server import Descriptors
from minidist.comm.local.limits import limit_blas
from minidist.comm.local.mailbox import Mailbox
from minidist.comm.local.mailbox_fabric import MailboxFabric
from minidist.comm.local.report import execute, pack
from minidist.comm.local.ring_buffer import NBYTES, RingBufferReader, RingBufferWriter
from minidist.comm.local.shared_memory import SharedMemory
from minidist.comm.local.wire import read_message, wake_up, write_message
from minidist.comm.local.wiring import Alarm, Place, Wiring
from minidist.comm.message import Key, Message

# How often a rank checks for the others, and yields its core, before it sleeps.
SPINS = 300 if platform.machine() in ("x86_64", "AMD64") else 0


def serve(
    place: Place,
    control: Connection,
    peers: dict[int, Connection],
    shared: Descriptors,
    alarm: Descriptors,
) -> None:
    """Be a rank: carry out the orders of the control connection until it closes.

    shared  the file of the shared memory, and the writing end of every rank's alarm
    alarm   the reading end of this rank's alarm
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked from the start
    keep_freed_memory()
    file, *writers = shared.numbers
    memory = SharedMemory(mmap.mmap(file, 0), place.rank, place.size)
    os.close(file)
    with limit_blas(place.size):
        process = RankProcess(place.rank, control, peers)
        process.connect(place, memory, Alarm(alarm.numbers[0], writers))
        process.work()
        process.fabric.close()


class RankProcess:
    """What both threads of a rank share, and what each does."""

    def __init__(self, rank: int, control: Connection, peers: dict[int, Connection]):
        self.rank, self.control, self.peers = rank, control, peers
        self.mailbox, self.ordered = Mailbox(), 0
        self.orders: queue.SimpleQueue[tuple[int, bool, bytes] | None] = queue.SimpleQueue()
        self.done, self.answering = 0, threading.Lock()
        self.readers: dict[int, RingBufferReader] = {}
        self.writers: dict[int, RingBufferWriter] = {}

    def connect(self, place: Place, memory: SharedMemory, alarm: Alarm) -> None:
        """Make the fabric; open the ring buffers where ranks spin."""
        wiring = Wiring(self.mailbox, memory, alarm, self.deliver, SPINS)
        self.fabric = MailboxFabric(place, wiring)
        if SPINS:
            self._open_ring_buffers(memory, place.size)

    def _open_ring_buffers(self, memory: SharedMemory, size: int) -> None:
        """Let small messages go through memory; a rank's region has the buffers that it reads."""
        self.incoming = memory.empty((size, NBYTES), np.uint8)  # untouched so far, hence zeros
        first = memory.offset_of(self.incoming) - memory.begin  # the same in every region
        for peer in self.peers:
            mine, theirs = (r * memory.region + first for r in (self.rank, peer))
            self.readers[peer] = RingBufferReader(memory, mine + peer * NBYTES)
            self.writers[peer] = RingBufferWriter(memory, theirs + self.rank * NBYTES)
        self.mailbox.polled, self.mailbox.spins = dict(self.readers), SPINS

    def work(self) -> None:
        """Carry out orders until the order None."""
        threading.Thread(target=self.read, name="reader", daemon=True).start()
        while (order := self.orders.get()) is not None:
            run, logged, payload = order
            report = execute(self.fabric, run, logged, payload, pickle.loads)
            assert report is not None  # nobody stops a process but by killing it
            packed = pack(report)
            self.done += 1  # before the caller knows, who may then go
            self.answer(run, packed)

    def read(self) -> None:
        """Put messages into the mailbox and orders into their queue; answer questions."""
        ready = selectors.DefaultSelector()
        ready.register(self.control, selectors.EVENT_READ)
        for source, peer in self.peers.items():
            ready.register(peer, selectors.EVENT_READ, source)
        try:
            while True:
                for event, _ in ready.select():
                    if event.fileobj is self.control:
                        self.obey(self.control.recv())
                        continue
                    try:
                        self.receive(event.data, read_message(self.peers[event.data]))
                    except (EOFError, OSError):
                        ready.unregister(event.fileobj)  # a rank has died: the caller stops us
        except (EOFError, OSError):
            if self.ordered > self.done:
                os._exit(0)  # the caller is gone in the middle of a run
            self.orders.put(None)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a rank that can receive nothing is of no use

    def receive(self, source: int, found: tuple[Key, Message] | None) -> None:
        """Take what came through a socket: a message, or None, a call to wake up."""
        if found is not None and source not in self.readers:
            self.mailbox.put(source, *found)
            return
        if found is not None:
            self.readers[source].from_socket.append(found)
        self.mailbox.notify()

    def obey(self, order: tuple) -> None:
        if order[0] == "snapshot":
            self.answer("snapshot", self.fabric.snapshot())
        else:
            self.ordered += 1
            self.orders.put(order[1:])

    def answer(self, kind: str | int, value: Snapshot | bytes) -> None:
        """Send a snapshot, or the report of the run of this number."""
        with self.answering, suppress(OSError):  # the caller may be gone
            self.control.send((kind, value))

    def deliver(self, to: int, key: Key, message: Message) -> None:
        if to == self.rank:
            self.mailbox.put_copy(to, key, message)
            return
        try:
            writer = self.writers.get(to)
            if writer is None or not writer.put(key, message):
                write_message(self.peers[to], key, message)
            elif writer.must_wake():
                wake_up(self.peers[to])
        except OSError:
            threading.Event().wait()  # the receiver has died: the caller sees it, and stops us
