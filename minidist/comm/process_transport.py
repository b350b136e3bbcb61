"""Ranks as processes of this machine: the default.

                   caller
         +-----------+-----------+          control connections: orders there, reports back
         |           |           |
      rank 0 ----- rank 1 ----- rank 2      a pair of sockets for each two ranks: messages
    +-----------+-----------+-----------+
    | region 0  | region 1  | region 2  |   shared memory, which every rank maps whole
    +-----------+-----------+-----------+

Arrays from `Group.empty` are in memory that all ranks see. So are the ring buffers of small
messages, which a rank takes when it waits for them. A message that is large, or finds its ring
buffer full, travels through the pair of sockets; in each process one thread reads whatever arrives
there, at once, so that a send never waits for a recv. Neither has a name that could be left behind.
The processes come from a fork server with NumPy loaded (or are spawned where there is none); they
never import the caller's script, because workers travel by value. `hosts` simulates several hosts,
as in thread_transport.py.
"""

import mmap
import multiprocessing as mp
import os
import pickle
import platform
import queue
import selectors
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

from minidist.backend import keep_freed_memory
from minidist.comm.board import Alarm
from minidist.comm.diagnosis import Snapshot
from minidist.comm.fabric import Connect
from minidist.comm.limits import check_size
from minidist.comm.mailbox import Mailbox
from minidist.comm.mailbox_fabric import MailboxFabric, numbered
from minidist.comm.message import Key, Message
from minidist.comm.report import Report, execute, fair_share_of_cores, pack, unpack
from minidist.comm.ring_buffer import NBYTES, RingBufferReader, RingBufferWriter
from minidist.comm.shared_memory import SharedMemory, create_file
from minidist.comm.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.wire import read_message, wake_up, write_message

SPINS = 300  # how often a rank checks for the others, and yields its core, before it sleeps
STARTING = threading.Lock()  # there is one `__main__`
PRELOAD = [
    "numpy",
    "threadpoolctl",
    "cloudpickle",
    "minidist.autograd",
    "minidist.comm.process_transport",
]


class ProcessRanks:
    """The caller's side: one process per rank, and a control connection to each."""

    def __init__(
        self,
        size: int,
        device: str,
        interleaving: int | None = None,
        connect: Connect = SharedMemoryCommunicator.connect,
        hosts: Sequence[Hashable] | None = None,
    ):
        if interleaving is not None:
            raise ValueError(
                "only ranks that are threads can be interleaved; use transport='thread'"
            )
        check_size(size, "process")
        hosts = numbered(hosts, size)
        if mp.current_process().daemon:
            raise ValueError("a rank cannot start processes of its own; use transport='thread'")
        self.size, self.processes, self.controls = size, [], []
        self.owner, self.awaited, self.came_in = os.getpid(), set(), []
        self.asked: set[int] = set()  # ranks that have not answered the last question
        with ExitStack() as theirs:  # what only the ranks need is closed here in any case
            try:
                self._start(device, connect, hosts, theirs)
            except BaseException:
                self.stop()
                raise

    def _start(self, device: str, connect: Connect, hosts: list[int], theirs: ExitStack) -> None:
        context = start_method()
        shared, alarms = Descriptors([create_file(self.size)]), []
        theirs.callback(shared.close)
        for _ in range(self.size):
            reader, writer = os.pipe()
            shared.numbers.append(writer)
            alarms.append(Descriptors([reader]))
            theirs.callback(alarms[-1].close)
        peers: list[dict[int, Connection]] = [{} for _ in range(self.size)]
        with _nameless_main():
            for rank in range(self.size):
                for other in range(rank + 1, self.size):
                    ends = context.Pipe()
                    peers[rank][other], peers[other][rank] = map(theirs.enter_context, ends)
                control, end = context.Pipe()
                self.controls.append(control)
                with end:  # so the rank holds the only other one: its death is our end-of-file
                    process = context.Process(
                        target=serve,
                        args=(
                            rank,
                            self.size,
                            device,
                            connect,
                            hosts,
                            end,
                            peers[rank],
                            shared,
                            alarms[rank],
                        ),
                        name=f"rank {rank}",
                        daemon=True,
                    )
                    self.processes.append(process)
                    with ctrl_c_waits():  # half an order would break the fork server
                        process.start()
                for end in peers[rank].values():  # at once, for all together they are N (N - 1)
                    end.close()

    def submit(self, run: int, logged: bool, payload: bytes) -> None:
        self.run, self.awaited, self.came_in = run, set(range(self.size)), []
        for control in self.controls:
            with suppress(OSError):  # a rank that has died meanwhile is found by `reports`
                control.send(("run", run, logged, payload))

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        """Return the (rank, Report) pairs that have come in; wait `timeout` for the first."""
        if not self.came_in:
            self._read(self.awaited, timeout)
        found, self.came_in = self.came_in, []
        return found

    def snapshots(self, patience: float = 1.0) -> dict[int, Snapshot | None]:
        """Ask every rank what it waits for; None for one that does not answer in time."""
        answers: dict[int, Snapshot | None] = dict.fromkeys(range(self.size))
        for rank in set(range(self.size)) - self.asked:  # one question at a time fits any socket
            self.asked.add(rank)
            with suppress(OSError):  # a rank that has died is found below
                self.controls[rank].send(("snapshot",))
        deadline = time.monotonic() + patience
        while self.asked and (left := deadline - time.monotonic()) > 0:
            answers.update(self._read(self.asked, left))
        return answers

    def _read(self, ranks: set[int], timeout: float | None) -> dict[int, Snapshot | None]:
        """Read one message of each of these ranks that has one; return the snapshots among them."""
        sources = {self.controls[rank]: rank for rank in ranks}
        # A child of a dead rank may hold its connection open, so the sentinel is watched, too.
        deaths = {self.processes[rank].sentinel: rank for rank in ranks}
        ready, answers = wait([*sources, *deaths], timeout), {}
        for control in [c for c in sources if c in ready]:
            rank = sources[control]
            try:
                kind, value = control.recv()
                if kind == "snapshot":
                    answers[rank] = value
                elif kind == self.run:
                    self._came_in(rank, unpack(value))
            except (EOFError, OSError):
                answers[rank] = self._came_in(rank, self._death_of(rank))
        for sentinel in [s for s in deaths if s in ready]:
            if not self.controls[deaths[sentinel]].poll():  # first read what it sent before it died
                rank = deaths[sentinel]
                answers[rank] = self._came_in(rank, self._death_of(rank))
        self.asked -= set(answers)
        return answers

    def _came_in(self, rank: int, report: Report) -> None:
        if rank in self.awaited:
            self.awaited.discard(rank)
            self.came_in.append((rank, report))

    def pid_of(self, rank: int) -> int:
        return self.processes[rank].pid

    def _death_of(self, rank: int) -> Report:
        process = self.processes[rank]
        process.join(timeout=5)
        return Report(
            exitcode=process.exitcode if process.exitcode is not None else -signal.SIGKILL
        )

    def decide(self, judge: Callable[[], dict[int, Report]]) -> dict[int, Report]:
        return judge()

    def finish(self) -> None:
        """End a run in which every rank has reported."""

    def stop(self, patience: float = 0.0) -> None:
        """End every rank: by itself if it is idle within `patience` seconds, else by force."""
        if os.getpid() != self.owner:
            return  # in a child that was forked from the caller
        for control in self.controls:
            control.close()
        deadline = time.monotonic() + patience
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()
                process.close()
        self.processes, self.controls = [], []


class Descriptors:
    """File descriptors that a process which is being started inherits as open files of its own."""

    def __init__(self, numbers: list[int]):
        self.numbers = numbers

    def __reduce__(self):
        return _received, ([reduction.DupFd(number) for number in self.numbers],)

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)


def _received(duplicates) -> Descriptors:
    return Descriptors([duplicate.detach() for duplicate in duplicates])


def start_method() -> BaseContext:
    """Return the multiprocessing context that ranks start in: the fork server where there is one.

    It is started, if need be, with Ctrl-C blocked. Ranks inherit that: the caller stops them.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # which would unblock it again
    with ctrl_c_waits():
        forkserver.ensure_running()
    return context


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay Ctrl-C until this block ends, so that the fork server gets a whole order.

    Processes started here inherit the block. Blocking alone is not enough: another thread,
    such as one of BLAS, may get it, and Python would still interrupt the first thread.
    """
    handler, came = None, []
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if handler is not None:
        signal.signal(signal.SIGINT, lambda *_: came.append(True))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _nameless_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again (as `__mp_main__`).

    A worker that the script defines is sent by value, so the ranks do not need the script, and the
    script needs no `if __name__ == "__main__"`.
    """
    with STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def serve(
    rank: int,
    size: int,
    device: str,
    connect: Connect,
    hosts: list[int],
    control: Connection,
    peers: dict[int, Connection],
    shared: Descriptors,
    alarm: Descriptors,
) -> None:
    """Be a rank: carry out the orders of the control connection until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked from the start
    keep_freed_memory()
    file, *writers = shared.numbers
    memory = SharedMemory(mmap.mmap(file, 0), rank, size)
    os.close(file)
    with threadpool_limits(fair_share_of_cores(size)):
        process = RankProcess(rank, control, peers)
        spins = SPINS if platform.machine() in ("x86_64", "AMD64") else 0
        process.fabric = MailboxFabric(
            rank,
            size,
            device,
            process.mailbox,
            memory,
            Alarm(alarm.numbers[0], writers),
            spins,
            process.deliver,
            connect,
            hosts=hosts,
        )
        if spins:
            process.open_ring_buffers(memory, size, spins)
        process.work()
        process.fabric.close()


class RankProcess:
    """The rank's side: its main thread works; a second thread reads all that arrives, at once."""

    def __init__(self, rank: int, control: Connection, peers: dict[int, Connection]):
        self.rank, self.control, self.peers = rank, control, peers
        self.mailbox, self.orders, self.ordered = Mailbox(), queue.SimpleQueue(), 0
        self.done, self.answering = 0, threading.Lock()
        self.sending = {to: threading.Lock() for to in peers}
        self.readers: dict[int, RingBufferReader] = {}
        self.writers: dict[int, RingBufferWriter] = {}

    def open_ring_buffers(self, memory: SharedMemory, size: int, spins: int) -> None:
        """Let small messages go through memory; a rank's region has the buffers that it reads."""
        self.incoming = memory.empty((size, NBYTES), np.uint8)  # untouched so far, hence zeros
        first = memory.offset_of(self.incoming) - memory.begin  # the same in every region
        for peer in self.peers:
            mine, theirs = (r * memory.region + first for r in (self.rank, peer))
            self.readers[peer] = RingBufferReader(memory, mine + peer * NBYTES)
            self.writers[peer] = RingBufferWriter(memory, theirs + self.rank * NBYTES)
        self.mailbox.polled, self.mailbox.spins = dict(self.readers), spins

    def work(self) -> None:
        """Carry out orders until the order None."""
        threading.Thread(target=self.read, name="reader", daemon=True).start()
        while (order := self.orders.get()) is not None:
            report = execute(self.fabric, *order, pickle.loads)
            packed = pack(report, cloudpickle.dumps)
            self.done += 1  # before the caller knows, who may then go
            self.answer(order[0], packed)

    def read(self) -> None:
        """Put messages into the mailbox and orders into their queue; answer questions."""
        ready = selectors.DefaultSelector()
        ready.register(self.control, selectors.EVENT_READ)
        for source, connection in self.peers.items():
            ready.register(connection, selectors.EVENT_READ, source)
        try:
            while True:
                for event, _ in ready.select():
                    if event.fileobj is self.control:
                        self.obey(self.control.recv())
                        continue
                    try:
                        self.receive(event.data, read_message(event.fileobj))
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
            array, was_on_gpu = message
            own = array if was_on_gpu else array.copy()  # what was on a GPU has been copied
            self.mailbox.put(to, key, Message(own, was_on_gpu))
            return
        try:
            with self.sending[to]:
                writer = self.writers.get(to)
                if writer is None or not writer.put(key, message):
                    write_message(self.peers[to], key, message)
                elif writer.must_wake():
                    wake_up(self.peers[to])
        except OSError:
            threading.Event().wait()  # the receiver has died: the caller sees it, and stops us
