"""Ranks as processes of this machine: the default.

Every pair of ranks shares a socket pair. In each process one thread reads whatever arrives, at
once, into the mailbox; so a send never waits for a recv, and pieces of any size travel without a
named segment that could be left behind. Processes come from a fork server with NumPy loaded (or are
spawned where there is none); they never import the caller's script, because workers travel by
value.
"""

import multiprocessing as mp
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait

import cloudpickle
import numpy as np
from threadpoolctl import threadpool_limits

from minidist.backend import keep_freed_memory
from minidist.comm.mailbox import Endpoint, Mailbox, copy_of
from minidist.comm.report import Report, execute, fair_share_of_cores, pack

PRELOAD = ["numpy", "threadpoolctl", "cloudpickle", "minidist.comm.process_transport"]


class ProcessRanks:
    """The caller's side: one process per rank, and a control connection to each."""

    def __init__(self, size: int, device: str):
        forks = "forkserver" in mp.get_all_start_methods()
        context = mp.get_context("forkserver" if forks else "spawn")
        if forks:
            start_fork_server()
        self.size, self.processes, self.controls = size, [], []
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
                        args=(rank, size, device, theirs, peers[rank]),
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

    def submit(self, run: int, payload: bytes) -> None:
        for control in self.controls:
            try:
                control.send(("run", run, payload))
            except OSError:
                pass  # a rank that has died meanwhile is found by `reports`
        self.awaited = set(range(self.size))

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        """Return the (rank, Report) pairs that have come in, waiting for the first; none if
        `timeout` passes before.
        """
        ranks = {self.controls[rank]: rank for rank in self.awaited}
        found = []
        for control in wait(list(ranks), timeout):
            rank = ranks[control]
            try:
                kind, value = control.recv()
                report = pickle.loads(value) if kind == "report" else None
            except (EOFError, OSError):
                report = self._death_of(rank)
            if report is not None:
                self.awaited.discard(rank)
                found.append((rank, report))
        return found

    def _death_of(self, rank: int) -> Report:
        process = self.processes[rank]
        process.join(timeout=5)
        return Report(
            exitcode=process.exitcode if process.exitcode is not None else -signal.SIGKILL
        )

    def waiting(self, ranks: list[int]) -> dict[int, list[str]]:
        """Ask ranks what they wait for; one that does not answer within a second is computing with
        the lock held.
        """
        answers = {rank: ["does not answer: it computes"] for rank in ranks}
        asked = {self.controls[rank]: rank for rank in ranks}
        for control in asked:
            try:
                control.send(("waiting",))
            except OSError:
                pass
        while asked:
            for control in (ready := wait(list(asked), 1.0)):
                try:
                    kind, value = control.recv()
                except (EOFError, OSError):
                    kind, value = "waiting", ["has died"]
                if kind == "waiting":
                    answers[asked.pop(control)] = value
            if not ready:
                break
        return answers

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


def start_fork_server() -> None:
    """Start it, if need be, with Ctrl-C blocked, which ranks inherit: they are the caller's to
    stop.
    """
    forkserver.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # which would unblock it again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def serve(rank: int, size: int, device: str, control: Connection, peers: dict) -> None:
    """Be a rank: run what the control connection brings, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked from the start
    keep_freed_memory()
    with threadpool_limits(fair_share_of_cores(size)):
        RankProcess(rank, size, device, control, peers).work()


class RankProcess:
    """The rank's side: its main thread works, a second one reads whatever arrives, at once."""

    def __init__(self, rank, size, device, control, peers):
        self.rank, self.control, self.peers = rank, control, peers
        self.mailbox, self.orders, self.busy = Mailbox(), queue.SimpleQueue(), threading.Event()
        self.answering = threading.Lock()
        self.sending = {to: threading.Lock() for to in peers}
        self.endpoint = Endpoint(rank, size, device, self.mailbox, self.deliver)
        threading.Thread(target=self.read, name="reader", daemon=True).start()

    def work(self) -> None:
        """Carry out orders until there is one to leave."""
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
                    elif (order := self.control.recv())[0] == "waiting":
                        self.answer("waiting", self.mailbox.waiting() or ["computes"])
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
            self.mailbox.put(to, key, copy_of(message))
            return
        try:
            with self.sending[to]:
                write_message(self.peers[to], key, message)
        except OSError:
            threading.Event().wait()  # the receiver has died: the caller sees it, and stops us


def write_message(connection: Connection, key, message) -> None:
    """Send a header, and after it the bytes of the array."""
    note, array, was_on_gpu = message
    array = np.ascontiguousarray(array).reshape(array.shape)
    connection.send((key, note, was_on_gpu, array.dtype.str, array.shape))
    if array.nbytes:
        connection.send_bytes(array.reshape(-1).view(np.uint8))


def read_message(connection: Connection) -> tuple:
    """Receive what `write_message` sent, straight into a fresh array."""
    key, note, was_on_gpu, dtype, shape = connection.recv()
    array = np.empty(shape, dtype)
    if array.nbytes:
        connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
    return key, (note, array, was_on_gpu)
