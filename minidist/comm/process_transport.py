"""Ranks as processes of this machine: the default.

Arrays from `Group.empty` lie in memory that all ranks see. Messages travel between every pair of
ranks through a pair of sockets; in each process one thread reads whatever arrives, at once, into
the mailbox, so that a send never waits for a recv. Neither has a name that could be left behind.
The processes come from a fork server with NumPy loaded (or are spawned where there is none); they
never import the caller's script, because workers travel by value.
"""

import mmap
import multiprocessing as mp
import os
import pickle
import platform
import queue
import signal
import sys
import threading
import time
import types
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection, wait

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

from minidist.backend import keep_freed_memory
from minidist.comm.board import Alarm
from minidist.comm.diagnosis import Snapshot
from minidist.comm.endpoint import Endpoint
from minidist.comm.mailbox import Mailbox
from minidist.comm.report import Report, execute, fair_share_of_cores, pack
from minidist.comm.shared_memory import SharedMemory, create_file

LOOKS = 300  # how often a rank looks for the others before it sleeps; fewer than 30 us
PRELOAD = ["numpy", "threadpoolctl", "cloudpickle", "minidist.comm.process_transport"]


class ProcessRanks:
    """The caller's side: one process per rank, and a control connection to each."""

    def __init__(self, size: int, device: str):
        self.size, self.processes, self.controls = size, [], []
        pipes = [os.pipe() for _ in range(size)]
        shared = Descriptors([create_file(size), *[writer for _, writer in pipes]])
        alarms = [Descriptors([reader]) for reader, _ in pipes]
        context = start_method()
        peers: list[dict[int, Connection]] = [{} for _ in range(size)]
        for low in range(size):
            for high in range(low + 1, size):
                peers[low][high], peers[high][low] = context.Pipe()
        try:
            with _nameless_main():
                for rank in range(size):
                    control, theirs = context.Pipe()
                    self.controls.append(control)
                    process = context.Process(
                        target=serve,
                        args=(rank, size, device, theirs, peers[rank], shared, alarms[rank]),
                        name=f"rank {rank}",
                        daemon=True,
                    )
                    self.processes.append(process)
                    process.start()
                    theirs.close()  # so the child holds the only other end: its death is our EOF
        except BaseException:
            self.stop()
            raise
        finally:
            for connection in [c for mine in peers for c in mine.values()]:
                connection.close()
            for descriptors in [shared, *alarms]:
                descriptors.close()

    def submit(self, run: int, logged: bool, payload: bytes) -> None:
        self.awaited, self.came_in = set(range(self.size)), []
        for control in self.controls:
            with suppress(OSError):  # a rank that has died meanwhile is found by `reports`
                control.send(("run", run, logged, payload))

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        """Return the (rank, Report) pairs that have come in, waiting for the first; none if
        `timeout` passes before.
        """
        if not self.came_in:
            self._read(self.awaited, timeout)
        found, self.came_in = self.came_in, []
        return found

    def snapshots(self, patience: float = 1.0) -> dict[int, Snapshot | None]:
        """Ask every rank what it waits for; None for one that does not answer in time."""
        answers: dict[int, Snapshot | None] = dict.fromkeys(range(self.size))
        asked = set(range(self.size))
        for rank in asked:
            with suppress(OSError):  # a rank that has died is found below
                self.controls[rank].send(("snapshot",))
        deadline = time.monotonic() + patience
        while asked and (left := deadline - time.monotonic()) > 0:
            for rank, answer in self._read(asked, left).items():
                answers[rank] = answer
                asked.discard(rank)
        return answers

    def _read(self, ranks: set[int], timeout: float | None) -> dict[int, Snapshot | None]:
        """Read one message of each of these ranks that has one; return the snapshots among them."""
        controls, answers = {self.controls[rank]: rank for rank in ranks}, {}
        for control in wait(list(controls), timeout):
            rank = controls[control]
            try:
                kind, value = control.recv()
                if kind == "snapshot":
                    answers[rank] = value
                    continue
                report = pickle.loads(value)
            except (EOFError, OSError):
                answers[rank] = None
                report = self._death_of(rank)
            if rank in self.awaited:
                self.awaited.discard(rank)
                self.came_in.append((rank, report))
        return answers

    def _death_of(self, rank: int) -> Report:
        process = self.processes[rank]
        process.join(timeout=5)
        return Report(
            exitcode=process.exitcode if process.exitcode is not None else -signal.SIGKILL
        )

    def finish(self) -> None:
        """End a run in which every rank has reported."""

    def stop(self, patience: float = 0.0) -> None:
        """End every rank: those that are idle by themselves within `patience` seconds, the others
        by force.
        """
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


def start_method():
    """Return the multiprocessing context that ranks start in: the fork server where there is one.

    It is started, if need be, with Ctrl-C blocked, which ranks inherit: they are the caller's to
    stop.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # which would unblock it again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextmanager
def _nameless_main():
    """Start processes that do not run the caller's script again: multiprocessing would import it as
    `__mp_main__`.

    A worker defined there is sent by value, so nobody needs it; and a script needs no `if __name__
    == "__main__"`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def serve(rank, size, device, control, peers, shared: Descriptors, alarm: Descriptors) -> None:
    """Be a rank: run what the control connection brings, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked from the start
    keep_freed_memory()
    file, *writers = shared.numbers
    memory = SharedMemory(mmap.mmap(file, 0), rank, size)
    os.close(file)
    cores = fair_share_of_cores(1)
    with threadpool_limits(fair_share_of_cores(size)):
        process = RankProcess(rank, control, peers)
        looks = LOOKS if size <= cores and platform.machine() in ("x86_64", "AMD64") else 0
        ring = Alarm(alarm.numbers[0], writers)
        process.endpoint = Endpoint(
            rank, size, device, process.mailbox, memory, ring, looks, process.deliver
        )
        process.work()


class RankProcess:
    """The rank's side: its main thread works, a second one reads whatever arrives, at once."""

    def __init__(self, rank: int, control: Connection, peers: dict[int, Connection]):
        self.rank, self.control, self.peers = rank, control, peers
        self.mailbox, self.orders, self.busy = Mailbox(), queue.SimpleQueue(), threading.Event()
        self.answering = threading.Lock()
        self.sending = {to: threading.Lock() for to in peers}

    def work(self) -> None:
        """Carry out orders until there is one to leave."""
        threading.Thread(target=self.read, name="reader", daemon=True).start()
        while (order := self.orders.get()) is not None:
            self.busy.set()
            report = execute(self.endpoint, *order, pickle.loads)
            self.busy.clear()
            self.answer("report", pack(report, cloudpickle.dumps))

    def read(self) -> None:
        """Put messages into the mailbox and orders into their queue; answer questions."""
        sources = {connection: source for source, connection in self.peers.items()}
        while True:
            for connection in wait([self.control, *sources]):
                try:
                    if connection is not self.control:
                        self.mailbox.put(sources[connection], *read_message(connection))
                    elif (order := self.control.recv())[0] == "snapshot":
                        self.answer("snapshot", self.endpoint.snapshot())
                    else:
                        self.orders.put(order[1:])
                except (EOFError, OSError):
                    if connection is not self.control:
                        del sources[connection]  # a rank has died: the caller sees it, and stops us
                    elif self.busy.is_set():
                        os._exit(0)  # the caller is gone in the middle of a run
                    else:
                        self.orders.put(None)
                        return

    def answer(self, kind: str, value) -> None:
        with self.answering:
            self.control.send((kind, value))

    def deliver(self, to: int, key, message) -> None:
        if to == self.rank:
            self.mailbox.put(to, key, (message[0].copy(), message[1]))
            return
        try:
            with self.sending[to]:
                write_message(self.peers[to], key, message)
        except OSError:
            threading.Event().wait()  # the receiver has died: the caller sees it, and stops us


def write_message(connection: Connection, key, message) -> None:
    """Send a header, and after it the bytes of the array."""
    array, was_on_gpu = message
    array = np.ascontiguousarray(array).reshape(array.shape)
    connection.send((key, was_on_gpu, array.dtype.str, array.shape))
    if array.nbytes:
        connection.send_bytes(array.reshape(-1).view(np.uint8))


def read_message(connection: Connection) -> tuple:
    """Receive what `write_message` sent, straight into a fresh array."""
    key, was_on_gpu, dtype, shape = connection.recv()
    array = np.empty(shape, dtype)
    if array.nbytes:
        connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
    return key, (array, was_on_gpu)
