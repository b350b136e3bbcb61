"""Ranks as processes that `mpiexec` has started, on one machine or several.

Every process runs the whole script, and calls `run` alike. In each, one thread is the rank; the
thread that called is the rank's control:

    process 0    caller: decides       rank 0: the worker   |
    process 1    caller: follows       rank 1: the worker   |  messages and collectives
    process 2    caller: follows       rank 2: the worker   |
                 reports, questions
                 and answers, outcome

Process 0 does what the caller of local ranks does: it collects reports, asks every rank what it
waits for, and finds out that a run has failed. The others answer its questions and get the outcome,
so every process returns the same results, or raises the same error. No thread blocks in MPI while
another rank may be missing: all poll, first often, then seldom. Polling also moves the messages
that others wait for, since MPI moves them only while it is called.
"""

import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import cloudpickle

from minidist.comm.diagnosis import SILENCE, Snapshot, Snapshots, without_arrived
from minidist.comm.fabric import Connect, Stopped
from minidist.comm.local.limits import limit_blas, refuse_interleaving
from minidist.comm.local.worker import Report, dumps, execute, pack, unpack
from minidist.comm.mpi.communicator import ABANDONED, Pause
from minidist.comm.mpi.library import check_world, load, wait_for_all
from minidist.comm.mpi.rank import MpiRank, hosts_of
from minidist.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.MPI import Request

ROUNDS = 10


def seconds_behind_first(
    comm: "MPI.Comm", hosts: list[int], clock: Callable[[], float] = time.monotonic
) -> list[float]:
    """Return the seconds to add to each process's clock to get process 0's time; all call this.

    A process asks process 0 for its time. The answer was true at some moment between the question
    and its arrival, so half of that interval bounds the error; the shortest of several intervals is
    taken (Cristian 1989, "Probabilistic clock synchronization").

    hosts  the number of each process's host; those on the host of process 0 share its clock
    clock  returns seconds
    """
    mine = 0.0
    for process in [p for p in range(comm.size) if hosts[p] != hosts[0]]:
        shortest = math.inf
        for _ in range(ROUNDS if comm.rank in (0, process) else 0):
            if comm.rank == 0:
                comm.recv(source=process)
                comm.send(clock(), process)
                continue
            asked = clock()
            comm.send(None, 0)
            answer, came = comm.recv(source=0), clock()
            if came - asked < shortest:
                shortest, mine = came - asked, answer - (asked + came) / 2
    return comm.allgather(mine)


BUSY = 0.0005  # seconds: the longest pause of the control while something of it is under way
IDLE = 0.01  # seconds: otherwise, when the rank's thread should have MPI for itself


class RankThread(threading.Thread):
    """A daemon, so that a rank that computes permanently cannot keep its process from ending."""

    def __init__(self, rank: int, work: Callable, *args):
        super().__init__(target=work, args=args, name=f"rank {rank}", daemon=True)

    def run(self):
        # The threads that a worker starts inherit the flag, and daemons do not count as the rank's.
        # Python reads it when this thread starts, so it may be cleared now; `daemon` cannot be set.
        self._daemonic = False
        super().run()


class MpiRanks:
    """One process's side of all ranks: its own rank, and its control."""

    def __init__(
        self,
        size: int,
        device: str,
        interleaving: int | None = None,
        connect: "Connect | None" = None,
        subset: bool = False,
        over: Callable | None = None,
    ):
        """Let the first `size` processes be ranks; all processes call this.

        connect  how to choose communicators: MPI's own, if None
        over     how to choose those above them, see MpiRank
        subset   whether there may be more processes than ranks; the others wait for the results

        ValueError, with the command to type, if MPI has started another number of processes.
        """
        refuse_interleaving(interleaving)
        MPI = load()
        check_world(size, MPI.COMM_WORLD.size, subset)
        wait_for_all(f"run, or Cluster, with {size} ranks")
        self.size, self.control = size, MPI.COMM_WORLD.Dup()
        self.me, self.status = self.control.rank, MPI.Status()
        self.pids, hosts = self.control.allgather(os.getpid()), hosts_of(self.control)
        self.behind = seconds_behind_first(self.control, hosts)
        world = self.control.Split(0 if self.me < size else MPI.UNDEFINED)
        self.rank = MpiRank(world, hosts[:size], device, connect, over) if self.me < size else None
        self.thread: RankThread | None = None  # of the present run
        self.run, self.running = 0, False
        self.packed: dict[int, bytes] = {}  # the reports of this run, by rank
        self.finished: deque[tuple[int, bytes]] = deque()  # (run, report) of this process's rank
        self.sending: list[Request] = []
        self.orders: deque[tuple[int, bool, bytes]] = deque()
        self.outcomes: dict[int, bytes] = {}  # by run
        self.came_in: list[tuple[int, Report]] = []
        self.answers: dict[int, Snapshot] = {}
        self.asked: set[int] = set()  # ranks that have not answered the last question

    # What Cluster needs: see Ranks.

    def submit(self, run: int, logged: bool, payload: bytes) -> None:
        """Start the rank of this process with the worker and the arguments of process 0."""
        if self.me == 0:
            self._tell_all("order", (run, logged, payload))
        else:
            self._serve_until(lambda: self.orders, f"for process 0 to start run {run}")
            self.run, logged, payload = self.orders.popleft()
            with self._failing_together():
                if self.run != run:
                    raise CommError(
                        f"process {self.me} is in run {run} of this cluster, process 0 in run "
                        f"{self.run}; all processes have to call the same runs in the same order"
                    )
        self.run, self.running, self.came_in, self.packed = run, True, [], {}
        if self.rank is not None:
            self.rank.polling.stopped_everywhere = threading.Event()
            self.thread = RankThread(self.me, self._work, self.rank, run, logged, payload)
            self.thread.start()

    def _work(self, rank: MpiRank, run: int, logged: bool, payload: bytes) -> None:
        with limit_blas(rank.here):  # per thread in some BLAS
            report = execute(rank.fabric, run, logged, payload, cloudpickle.loads)
        if report is not None:
            self.finished.append((run, pack(report)))

    def decide(self, judge: Callable[[], dict[int, Report]]) -> dict[int, Report]:
        """Return the reports, or raise the error, of `judge` on process 0, on every process."""
        if self.me:
            with self._failing_together():
                self._serve_until(lambda: self.run in self.outcomes)
            packed, error, cause = pickle.loads(self.outcomes.pop(self.run))
            if error is not None:
                raise error from cause
            return {rank: self._unpacked(rank, report) for rank, report in packed.items()}
        try:
            reports = judge()
        except BaseException as error:
            self._tell_all("outcome", (self.run, _packed_error(error)))
            raise
        self._tell_all("outcome", (self.run, pickle.dumps((self.packed, None, None))))
        return reports

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Report what is raised here, as Ctrl-C is, to process 0, which ends the run for all."""
        try:
            yield
        except BaseException as error:
            report = Report(error=error, traceback="".join(traceback.format_exception(error)))
            self._tell(0, "report", (self.run, pack(report)))
            raise

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        self._serve_until(lambda: self.came_in, timeout=timeout)
        reports, self.came_in = self.came_in, []
        return reports

    def snapshots(self) -> Snapshots:
        self.answers = {0: self._snapshot()}
        for rank in set(range(1, self.size)) - self.asked:  # one question at a time
            self.asked.add(rank)
            self._tell(rank, "question", None)
        self._serve_until(lambda: not self.asked, timeout=1.0)
        return without_arrived({rank: self.answers.get(rank) for rank in range(self.size)})

    def _snapshot(self) -> Snapshot:
        assert self.rank is not None  # only ranks are asked
        return self.rank.fabric.snapshot()

    def pid_of(self, rank: int) -> int:
        return self.pids[rank]

    def finish(self) -> None:
        self._serve_until(lambda: not self.sending)
        if self.rank is not None and self.thread is not None:
            self.rank.polling.stopped_everywhere.set()  # a rank reports after it has stopped
            self.thread.join()
            self.rank.free_groups()
        self.running = False

    def stop(self, patience: float = 0.0) -> None:
        """Stop this process's rank at its next communication; wait a second for it."""
        if self.rank is not None:
            self.rank.fabric.mailbox.close(Stopped())
        if not self.running:
            if self.rank is not None:
                self.rank.free()
            self.control.Free()
            return
        everywhere = self.control.Ibarrier()
        self._serve_until(lambda: not self.sending and everywhere.Test(), timeout=1)
        ABANDONED.append((everywhere, self.sending))
        if self.rank is not None and self.thread is not None:
            self.rank.polling.stopped_everywhere.set()
            self.rank.fabric.close(failed=True)  # the rank may wait for a kernel
            self.thread.join(timeout=1)
            ABANDONED.append((self.rank.sender.pending, self.rank.fabric.mailbox.polled))

    # Control: messages between process 0 and the others.

    def _tell(self, process: int, kind: str, content: object) -> None:
        self.sending.append(self.control.isend((kind, content), process))

    def _tell_all(self, kind: str, content: object) -> None:
        for process in range(1, self.control.size):
            self._tell(process, kind, content)

    def _serve_until(
        self, condition: Callable[[], object], waiting: str = "", timeout: float | None = None
    ) -> None:
        """Serve the other processes until the condition holds, or for `timeout` seconds.

        waiting  what this process waits for, to be printed once after SILENCE seconds
        """
        begin, pause = time.monotonic(), Pause()
        while True:
            if self._serve():
                pause = Pause()
            waited = time.monotonic() - begin
            if condition() or (timeout is not None and waited >= timeout):
                return
            if waiting and waited > SILENCE:
                print(f"minidist: process {self.me} waits {waiting}", file=sys.stderr)
                waiting = ""
            pause(BUSY if self._has_sends() else IDLE)

    def _has_sends(self) -> bool:
        """Return whether others may wait for what this process moves by calling MPI."""
        return bool(self.sending or (self.rank and self.rank.sender.pending))

    def _serve(self) -> bool:
        """Send this rank's report, read messages, free what has been sent.

        Return whether there was a report or a message.
        """
        self.sending = [request for request in self.sending if not request.test()[0]]
        if self.rank is not None:
            self.rank.sender.progress()
        came = bool(self.finished)
        while self.finished:
            run, packed = self.finished.popleft()
            if self.me == 0:
                self._came_in(0, run, packed)
            else:
                self._tell(0, "report", (run, packed))
        while (message := self.control.improbe(status=self.status)) is not None:
            source, (kind, content), came = self.status.source, message.recv(), True
            match kind:
                case "order":
                    self.orders.append(content)
                case "report":
                    self._came_in(source, *content)
                case "question":
                    self._tell(0, "answer", self._snapshot())
                case "answer":
                    self.asked.discard(source)
                    self.answers[source] = content
                case "outcome":
                    self.outcomes.update([content])
        return came

    def _came_in(self, rank: int, run: int, packed: bytes) -> None:
        if run == self.run:
            self.packed[rank] = packed
            self.came_in.append((rank, self._unpacked(rank, packed)))

    def _unpacked(self, rank: int, packed: bytes) -> Report:
        """Return a report, its events by the clock of process 0."""
        report = unpack(packed)
        report.log = report.log and report.log.later(self.behind[rank])
        return report


def _packed_error(error: BaseException) -> bytes:
    """Serialise an error, with its cause if that can be serialised, too."""
    for raised in (error, CommError(f"process 0 was stopped by {error!r}")):
        for cause in (error.__cause__, None):
            with suppress(Exception):
                packed = dumps((None, raised, cause))
                pickle.loads(packed)
                return packed
    raise AssertionError("an error of minidist's own cannot be serialised")
