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
`hosts` simulates several hosts, as in threads.py.

The processes come from a fork server with NumPy loaded (or are spawned where there is none); they
never import the caller's script, because workers travel by value. The server listens at a socket,
whose folder multiprocessing removes when the caller ends, but not when a signal ends the caller. So
the folder is removed at once: Linux reaches an open socket, which has no name any more, by its
descriptor.

    start_method ...   how a process starts: without the caller's script, and safe from Ctrl-C
    RankProcess        a rank's side
    ProcessRanks       the caller's side: starts the ranks, gives orders, collects reports
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
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from minidist.backend import keep_freed_memory
from minidist.comm.communicator import Key, Message
from minidist.comm.diagnosis import Snapshot, Snapshots
from minidist.comm.fabric import Connect, Fabric, Mailbox, Place, numbered
from minidist.comm.local.limits import check_size, limit_blas, refuse_interleaving
from minidist.comm.local.ring_buffer import (
    NBYTES,
    RingBufferReader,
    RingBufferWriter,
    read_message,
    wake_up,
    write_message,
)
from minidist.comm.local.shared_memory import SharedMemory, create_file
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.local.worker import Report, execute, pack, unpack
from minidist.errors import WrongInput

STARTING = threading.Lock()  # there is one `__main__`
PRELOAD = [
    "numpy",
    "threadpoolctl",
    "cloudpickle",
    "minidist.autograd",
    "minidist.comm.local.processes",
]


class Descriptor:
    """A file descriptor that a process which is being started inherits as an open file."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)

    def close(self) -> None:
        os.close(self.number)


def _received(duplicate) -> Descriptor:
    return Descriptor(duplicate.detach())


def start_method() -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context that ranks start in: the fork server where there is one.

    It is started, if need be, with Ctrl-C blocked. Ranks inherit that: the caller stops them.
    A process that was forked after the start cannot use its parent's server: its ranks are spawned.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # which would unblock it again
    try:
        with STARTING, ctrl_c_waits():
            _ensure_running()
    except ChildProcessError:  # the server is no child of this process
        return mp.get_context("spawn")
    return context


def _ensure_running() -> None:
    """Start the fork server if it does not run, at a socket without a name where Linux has it."""
    if not (hasattr(os, "O_PATH") and os.path.exists("/proc/self/fd")):
        forkserver.ensure_running()
        return
    config = mp.current_process()._config  # type: ignore[attr-defined]  # no public name
    server: Any = forkserver._forkserver
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:  # a socket's path is short
        usual, config["tempdir"] = config.get("tempdir"), folder
        try:
            forkserver.ensure_running()
        finally:
            config["tempdir"] = usual
        if os.path.dirname(server._forkserver_address) == folder:  # it has been started here
            socket = os.open(server._forkserver_address, os.O_PATH)
            server._forkserver_address = f"/proc/self/fd/{socket}"


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay Ctrl-C until this block ends, so that the fork server gets a whole order.

    Processes started here inherit the block.
    """
    # Blocking alone is not enough: another thread, such as one of BLAS, may get the signal, and
    # Python would still interrupt the first thread.
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
def nameless_main() -> Iterator[None]:
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


# How often a rank checks for the others, and yields its core, before it sleeps.
SPINS = 300 if platform.machine() in ("x86_64", "AMD64") else 0


def serve(
    place: Place,
    control: Connection,
    peers: dict[int, Connection],
    shared: Descriptor,
) -> None:
    """Be a rank: carry out the orders of the control connection until it closes.

    shared  the file of the shared memory
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked from the start
    keep_freed_memory()
    memory = SharedMemory(mmap.mmap(shared.number, 0), place.rank, place.size)
    shared.close()
    with limit_blas(place.size):
        process = RankProcess(place, control, peers, memory)
        process.work()
        process.fabric.close()


class RankProcess:
    """What both threads of a rank share, and what each does."""

    def __init__(
        self,
        place: Place,
        control: Connection,
        peers: dict[int, Connection],
        memory: SharedMemory,
    ):
        self.rank, self.control, self.peers = place.rank, control, peers
        self.mailbox, self.ordered = Mailbox(), 0
        self.orders: queue.SimpleQueue[tuple[int, bool, bytes] | None] = queue.SimpleQueue()
        self.done, self.answering = 0, threading.Lock()
        self.readers: dict[int, RingBufferReader] = {}
        self.writers: dict[int, RingBufferWriter] = {}
        self.fabric = Fabric(place, self.mailbox, memory, self.wake, self.deliver)
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

    def receive(self, source: int, message: tuple[Key, Message] | None) -> None:
        """Take a (key, message) that came through a socket, or None, a call to wake up."""
        if message is not None and source not in self.readers:
            self.mailbox.put(source, *message)
            return
        if message is not None:
            self.readers[source].from_socket.append(message)
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
        try:
            writer = self.writers.get(to)
            if writer is None or not writer.put(key, message):
                write_message(self.peers[to], key, message)
            elif writer.must_wake():
                wake_up(self.peers[to])
        except OSError:
            threading.Event().wait()  # the receiver has died: the caller sees it, and stops us

    def wake(self, rank: int) -> None:
        with self.fabric.outgoing[rank].lock, suppress(OSError):  # the rank may have died
            wake_up(self.peers[rank])


class ProcessRanks:
    """The caller's side, see Ranks in cluster.py: a process and a connection for each rank."""

    def __init__(
        self,
        size: int,
        device: str,
        interleaving: int | None = None,
        connect: Connect = SharedMemoryCommunicator.connect,
        hosts: Sequence[Hashable] | None = None,
    ):
        refuse_interleaving(interleaving)
        check_size(size, "process")
        numbers = numbered(hosts, size)
        if mp.current_process().daemon:
            raise WrongInput(
                "a rank, or another daemon of multiprocessing, cannot start processes of its own; "
                "use transport='thread'"
            )
        self.size = size
        self.processes: list[BaseProcess] = []
        self.controls: list[Connection] = []
        self.awaited: set[int] = set()  # ranks that have not reported
        self.came_in: list[tuple[int, Report]] = []
        self.asked: set[int] = set()  # ranks that have not answered the last question
        with ExitStack() as theirs:  # what only the ranks need is closed here in any case
            try:
                self._start(device, connect, numbers, theirs)
            except BaseException:
                self.stop()
                raise

    def _start(self, device: str, connect: Connect, hosts: list[int], theirs: ExitStack) -> None:
        context = start_method()
        shared = Descriptor(create_file(self.size))
        theirs.callback(shared.close)
        peers: list[dict[int, Connection]] = [{} for _ in range(self.size)]
        with nameless_main():
            for rank in range(self.size):
                for other in range(rank + 1, self.size):
                    ends = context.Pipe()
                    peers[rank][other], peers[other][rank] = map(theirs.enter_context, ends)
                control, end = context.Pipe()
                self.controls.append(control)
                place = Place(rank, self.size, device, hosts, connect)
                with end:  # so the rank holds the only other one: its death is our end-of-file
                    process = context.Process(
                        target=serve,
                        args=(place, end, peers[rank], shared),
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
        if not self.came_in:
            self._read(self.awaited, timeout)
        reports, self.came_in = self.came_in, []
        return reports

    def snapshots(self) -> Snapshots:
        """Ask every rank what it waits for; None for one that does not answer within a second."""
        answers: Snapshots = dict.fromkeys(range(self.size))
        for rank in set(range(self.size)) - self.asked:  # one question at a time fits any socket
            self.asked.add(rank)
            with suppress(OSError):  # a rank that has died is found below
                self.controls[rank].send(("snapshot",))
        deadline = time.monotonic() + 1.0
        while self.asked and (left := deadline - time.monotonic()) > 0:
            answers.update(self._read(self.asked, left))
        return answers

    def _read(self, ranks: set[int], timeout: float | None) -> Snapshots:
        """Read one message of each of these ranks that has one; return the snapshots among them."""
        sources = {self.controls[rank]: rank for rank in ranks}
        # A child of a dead rank may hold its connection open, so the sentinel is watched, too.
        deaths = {self.processes[rank].sentinel: rank for rank in ranks}
        answers: Snapshots = {}
        dead, ready = [], wait([*sources, *deaths], timeout)
        for control in [c for c in sources if c in ready]:
            rank = sources[control]
            try:
                kind, value = control.recv()
                if kind == "snapshot":
                    answers[rank] = value
                elif kind == self.run:
                    self._came_in(rank, unpack(value))
            except (EOFError, OSError):
                dead.append(rank)
        for sentinel in [s for s in deaths if s in ready]:
            if not self.controls[deaths[sentinel]].poll():  # first read what it sent before it died
                dead.append(deaths[sentinel])
        for rank in dead:
            self._came_in(rank, self._death_of(rank))
            answers[rank] = None
        self.asked -= set(answers)
        return answers

    def _came_in(self, rank: int, report: Report) -> None:
        if rank in self.awaited:
            self.awaited.discard(rank)
            self.came_in.append((rank, report))

    def pid_of(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None  # it has been started
        return pid

    def _death_of(self, rank: int) -> Report:
        process = self.processes[rank]
        process.join(timeout=5)
        return Report(
            exitcode=process.exitcode if process.exitcode is not None else -signal.SIGKILL
        )

    def decide(self, judge: Callable[[], dict[int, Report]]) -> dict[int, Report]:
        return judge()

    def finish(self) -> None: ...

    def stop(self, patience: float = 0.0) -> None:
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
