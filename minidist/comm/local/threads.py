"""Ranks as threads of this process: up in a millisecond, and a debugger can step in.

Like processes they share only the memory of `Group.empty`: the worker, its arguments and messages
are copied for each rank. A thread cannot be killed: after a failure elsewhere it stops at its next
communication.

`hosts` names a host for each rank, to simulate several: all_reduce by "hierarchical" then sends and
counts what it would send between such hosts. Nothing else changes: all ranks share memory.

In an interleaving one rank runs at a time; whenever it is about to communicate, a seeded generator
draws who goes on, among those that can. So a race appears again when its seed is used again, and
hypothesis can search for the smallest program that has it. (Threads that a worker starts itself are
not held to turns.)
"""

import mmap
import os
import queue
import random
import threading
from collections.abc import Callable, Hashable, Sequence

import cloudpickle

from minidist.comm.communicator import Key, Message
from minidist.comm.diagnosis import Snapshots
from minidist.comm.fabric import Connect, Fabric, Mailbox, Place, Stopped, fresh, numbered
from minidist.comm.local.limits import check_size, limit_blas
from minidist.comm.local.shared_memory import SharedMemory, create_file
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.local.worker import Report, execute


class Interleaving:
    """Whose turn it is, for `size` ranks; each waits for its turn in a thread of its own."""

    def __init__(self, size: int, seed: int | str):
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.can_go: dict[int, Callable[[], bool]] = {}  # ranks that are there and wait for a turn
        self.size, self.left = size, set[int]()
        self.running: int | None = None

    def _draw(self) -> None:
        """Give the turn to a rank that can go; to none before all are there, or if none can."""
        if self.running is None and len(self.can_go) + len(self.left) == self.size:
            able = [rank for rank in sorted(self.can_go) if self.can_go[rank]()]
            if able:
                self.running = self.random.choice(able)
                self.changed.notify_all()

    def wait_until(self, rank: int, condition: Callable[[], bool]) -> None:
        """Hand the turn on; return when it is this rank's again, and `condition` holds."""
        with self.changed:
            self.running = None if self.running == rank else self.running
            self.can_go[rank] = condition
            self._draw()
            while self.running != rank:
                self.changed.wait(0.05)  # a thread without turns may have made a condition true
                self._draw()
            del self.can_go[rank]

    def leave(self, rank: int) -> None:
        """Take no more turns: the worker has ended."""
        with self.changed:
            self.left.add(rank)
            self.running = None if self.running == rank else self.running
            self._draw()


class Turns:
    """One rank's part of an Interleaving; other threads than its worker's take no turns."""

    def __init__(self, interleaving: Interleaving, rank: int):
        self.interleaving, self.rank, self.thread = interleaving, rank, threading.get_ident()

    def offer(self) -> None:
        """Let another rank go first, perhaps."""
        self.wait_until(lambda: True)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition and for a turn; False, at once, if this thread takes no turns."""
        if threading.get_ident() != self.thread:
            return False
        self.interleaving.wait_until(self.rank, condition)
        return True


class ThreadRanks:
    """The caller's side, see Ranks in cluster.py."""

    def __init__(
        self,
        size: int,
        device: str,
        interleaving: int | None = None,
        connect: Connect = SharedMemoryCommunicator.connect,
        hosts: Sequence[Hashable] | None = None,
    ):
        check_size(size, "thread")
        numbers = numbered(hosts, size)
        self.size, self.seed = size, interleaving
        self.queue: queue.SimpleQueue[tuple[int, Report]] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        descriptor = create_file(size)
        shared = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        mailboxes = [Mailbox() for _ in range(size)]
        self.fabrics = [
            Fabric(
                Place(rank, size, device, numbers, connect),
                mailboxes[rank],
                SharedMemory(shared, rank, size),
                lambda to: mailboxes[to].notify(),
                _deliver_from(rank, mailboxes),
                own_process=False,
            )
            for rank in range(size)
        ]

    def submit(self, run: int, logged: bool, payload: bytes) -> None:
        self.limits = limit_blas(self.size)
        self.turns = None if self.seed is None else Interleaving(self.size, f"{self.seed} {run}")
        self.threads = [
            threading.Thread(
                target=self._serve,
                args=(fabric, run, logged, payload),
                name=f"rank {fabric.rank}",
                daemon=True,
            )
            for fabric in self.fabrics
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, fabric: Fabric, run: int, logged: bool, payload: bytes) -> None:
        if self.turns is not None:
            fabric.mailbox.pace = Turns(self.turns, fabric.rank)
            fabric.mailbox.pace.offer()
        report = execute(fabric, run, logged, payload, cloudpickle.loads)
        if self.turns is not None:
            self.turns.leave(fabric.rank)
        if report is not None:
            self.queue.put((fabric.rank, report))

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        try:
            reports = [self.queue.get(timeout=timeout)]
            while not self.queue.empty():
                reports.append(self.queue.get())
            return reports
        except queue.Empty:
            return []

    def snapshots(self) -> Snapshots:
        return {fabric.rank: fabric.snapshot() for fabric in self.fabrics}

    def pid_of(self, rank: int) -> int:
        return os.getpid()

    def decide(self, judge: Callable[[], dict[int, Report]]) -> dict[int, Report]:
        return judge()

    def finish(self) -> None:
        for thread in self.threads:
            thread.join()
        self.threads = []
        self.limits.restore_original_limits()

    def stop(self, patience: float = 0.0) -> None:
        """Stop every rank at its next communication; wait a second for each."""
        for fabric in self.fabrics:
            fabric.mailbox.close(Stopped())
        for thread in self.threads:
            thread.join(timeout=1)
        if self.threads:
            self.limits.restore_original_limits()


def _deliver_from(rank: int, mailboxes: list[Mailbox]) -> Callable[[int, Key, Message], None]:
    """Return a fabric's `deliver`. It refers to no fabric, so dropped ranks are freed at once."""

    def deliver(to: int, key: Key, message: Message) -> None:
        array, was_on_gpu = message
        mailboxes[to].put(rank, key, (fresh(array), was_on_gpu))

    return deliver
