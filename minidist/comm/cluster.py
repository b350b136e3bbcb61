"""Cluster: start ranks, hand out work, collect results, turn a failure into one error."""

import itertools
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Protocol

import numpy as np

from minidist.backend import check_device
from minidist.comm import nccl
from minidist.comm.diagnosis import Silence, Snapshots, is_deadlock, lost_messages, table
from minidist.comm.local.processes import ProcessRanks
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.local.threads import ThreadRanks
from minidist.comm.local.worker import Order, Report, dumps
from minidist.comm.mpi import library as mpi
from minidist.comm.mpi.transport import MpiRanks
from minidist.errors import (
    CommError,
    CommTimeout,
    Deadlock,
    RankDied,
    RankFailed,
    WrongInput,
    check_name,
    is_wrong_input,
)
from minidist.events import EventLog

LOOK_EVERY = 0.4  # seconds without a report after which the ranks are asked what they wait for


class Ranks(Protocol):
    """What Cluster needs of a transport: ranks that are up, and wait for work.

    A transport starts them, or takes those that mpiexec has started; each rank calls `execute`
    (local/worker.py) for every run.
    """

    def submit(self, run: int, logged: bool, payload: bytes) -> None:
        """Give every rank a run: its number, whether it has a log, the worker and arguments."""

    def reports(self, timeout: float | None) -> list[tuple[int, Report]]:
        """Return the (rank, Report) pairs that have come in; wait `timeout` for the first."""

    def snapshots(self) -> Snapshots:
        """Return a snapshot of every rank's waits; None for one that does not answer."""

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank that does not answer."""

    def decide(self, judge: Callable[[], dict[int, Report]]) -> dict[int, Report]:
        """Return the reports of `judge()`, or raise its error.

        Where several processes call this, one of them calls `judge`, and all get its outcome.
        """

    def finish(self) -> None:
        """End a run in which every rank has reported."""

    def stop(self, patience: float = 0.0) -> None:
        """End every rank: by itself if it is idle within `patience` seconds, else by force."""


def nccl_ranks(size: int, device: str, interleaving: int | None = None) -> Ranks:
    """Start processes that have a GPU each; NCCL moves the arrays of their collectives."""
    nccl.check_ranks(size, device)
    connect = partial(nccl.connect, SharedMemoryCommunicator.connect)
    return ProcessRanks(size, device, interleaving, connect)


def mpi_nccl_ranks(
    size: int, device: str, interleaving: int | None = None, subset: bool = False
) -> Ranks:
    """Take the processes that mpiexec has started, on hosts with a GPU for each of their ranks."""
    nccl.check_device(device, "mpi-nccl")
    return MpiRanks(size, device, interleaving, subset=subset, over=nccl.connect)


TRANSPORTS: dict[str, Callable[[int, str, int | None], Ranks]] = {
    "process": ProcessRanks,  # (size, device, interleaving): starts the ranks, or a ValueError
    "thread": ThreadRanks,
    "mpi": MpiRanks,
    "mpi-subset": partial(MpiRanks, subset=True),
    "nccl": nccl_ranks,
    "mpi-nccl": mpi_nccl_ranks,
}


def run(
    worker: Callable,
    size: int,
    *args,
    transport: str | None = None,
    timeout: float | None = None,
    device: str = "cpu",
    log: EventLog | None = None,
    interleaving: int | None = None,
) -> list:
    """Call worker(group, *args) on `size` ranks; return their results in rank order.

    worker        any function, also of a script or a notebook cell; it is sent by value, as are
                  args and results
    transport     "process": a process of this machine, at most 123 of them (the default; where
                  torchrun, srun or mpiexec has started several such programs, a warning is
                  printed, while a command of minidist stops)
                  "thread": a thread of this process, for a debugger
                  "mpi": the processes that mpiexec has started. Each calls this and gets the
                  results; all ranks run the worker of process 0, with its arguments
                  "mpi-subset": the first `size` of these processes; the others wait for results
                  "nccl", "mpi-nccl": as "process" and "mpi", with a GPU for each rank; NCCL moves
                  the arrays of collectives
    timeout       seconds after which the run ends in CommTimeout
    device        `group.device`, where `group.empty` allocates: "cpu"; "gpu", where the n-th rank
                  of a host uses GPU n modulo their number; or "gpu:N", where all ranks use GPU N
    log           an EventLog that gets every rank's events
    interleaving  a seed, for threads: the same seed, the same order of events

    Each rank's BLAS gets at most cores // size threads (fewer if OMP_NUM_THREADS says so), so one
    rank alone uses them all: to compare numbers of ranks fairly, set OMP_NUM_THREADS=1.

    Errors: what Cluster.run raises, and ValueError, with a remedy, if `size` ranks are impossible.
    """
    with Cluster(size, transport, device, interleaving) as cluster:
        return cluster.run(worker, *args, timeout=timeout, log=log)


class Cluster:
    """Ranks that stay up between runs; a failure stops them all, and the next run starts new ones.

    Use it in a `with`, or call `close()`. The ranks end with the interpreter at the latest.
    """

    def __init__(
        self,
        size: int,
        transport: str | None = None,
        device: str = "cpu",
        interleaving: int | None = None,
    ):
        if not isinstance(size, int | np.integer) or size < 1:
            raise WrongInput(f"a cluster has a whole number of ranks from 1, not {size!r}")
        size = int(size)
        if transport is None:
            transport = "process"
            if not mpi.is_loaded():
                mpi.warn_of_copies()
        check_name("transport", transport, TRANSPORTS)
        check_device(device)
        self.size, self.transport, self.device = size, transport, device
        self.interleaving = interleaving
        self._runs, self._running = itertools.count(1), threading.Lock()
        self._ranks: Ranks | None = None
        self._start()

    def _new_ranks(self) -> Ranks:
        return TRANSPORTS[self.transport](self.size, self.device, self.interleaving)

    def _start(self) -> Ranks:
        ranks = self._new_ranks()
        self._ranks, self._owner = ranks, os.getpid()
        self._finalizer = weakref.finalize(self, _stop_own, self._owner, ranks, 1.0)
        return ranks

    def run(
        self,
        worker: Callable,
        *args,
        timeout: float | None = None,
        log: EventLog | None = None,
    ) -> list:
        """Call worker(group, *args) on every rank; return the results in rank order.

        NumPy warns, ignores or raises there (np.errstate) as it does in the caller.

        Or raise one error: RankDied, RankFailed (chained to the remote exception),
        CollectiveMismatch, Deadlock, CommTimeout, or CommError for a message that nobody received.
        After each of them, and after Ctrl-C, all ranks have stopped.
        """
        if timeout is not None and not (isinstance(timeout, Real) and 0 < timeout < 1e9):
            raise WrongInput(f"a timeout is a number of seconds above 0, or None, not {timeout!r}")
        if self._ranks is not None and self._owner != os.getpid():
            raise WrongInput(
                f"this cluster's ranks are those of process {self._owner}, and this is a process "
                "that was forked from it; make a Cluster here"
            )
        payload = dumps(Order(worker, args, np.geterr()))
        with self._running:  # one run at a time, also where several threads ask for one
            reports = self._run(payload, timeout, log is not None)
        if log is not None:
            for rank in range(self.size):
                log.extend(reports[rank].log or EventLog())
        return [reports[rank].result for rank in range(self.size)]

    def _run(self, payload: bytes, timeout: float | None, logged: bool) -> dict[int, Report]:
        ranks = self._ranks or self._start()
        try:
            ranks.submit(next(self._runs), logged, payload)
            reports = ranks.decide(lambda: self._collect(ranks, timeout))
            ranks.finish()
        except BaseException:
            self._stop()
            raise
        return reports

    def _collect(self, ranks: Ranks, timeout: float | None) -> dict[int, Report]:
        """Wait for every rank's report; ask the ranks what they wait for when none comes."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        reports: dict[int, Report] = {}
        before: Snapshots = {}
        silence = Silence()
        while len(reports) < self.size:
            new = ranks.reports(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))
            reports.update(new)
            if any(report.failed or report.died for _, report in new):
                reports.update(ranks.reports(0.05))  # failures that it caused, for precedence
                raise_first_failure(reports)
            if not new:
                now, finished = ranks.snapshots(), set(reports)
                if is_deadlock(before, now, finished):
                    raise Deadlock(f"every rank waits:\n{table(now, finished)}")
                if time.monotonic() >= deadline:
                    late = f"not done in {timeout:g} s; give a longer timeout=, or None:"
                    raise CommTimeout(f"{late}\n{table(now, finished)}")
                if silent := silence.overdue(now, finished, time.monotonic()):
                    pids = {rank: ranks.pid_of(rank) for rank in sorted(silent)}
                    print(silence.in_words(pids), table(now, finished), sep="\n", file=sys.stderr)
                before = now
        if lost := lost_messages([report.unreceived for report in reports.values()]):
            raise CommError(f"messages that nobody received: {lost}")
        return reports

    def _stop(self, patience: float = 0.0) -> None:
        if self._ranks is not None and self._finalizer.detach():
            _stop_own(self._owner, self._ranks, patience)
        self._ranks = None

    def close(self) -> None:
        """End all ranks. The next `run` would start new ones."""
        self._stop(patience=2.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _stop_own(owner: int, ranks: Ranks, patience: float) -> None:
    """Stop these ranks, except in a process that was forked from their owner."""
    if os.getpid() == owner:
        ranks.stop(patience)


def raise_first_failure(reports: dict[int, Report]) -> None:
    """Raise the most important failure: a death, then our bug, then wrong input; then by rank."""
    for rank, report in sorted(reports.items()):
        if (code := report.exitcode) is not None:
            why = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            raise RankDied(f"rank {rank} died without a report ({why})", rank, code)
    failures = [(rank, report) for rank, report in sorted(reports.items()) if report.failed]
    for rank, report in sorted(failures, key=lambda failure: is_wrong_input(failure[1].error)):
        if not isinstance(report.error, CommError):
            message = f"rank {rank} failed:\n{report.traceback}"
            raise RankFailed(message, rank) from report.error
    for _, report in failures[:1]:
        if report.error is not None:
            raise type(report.error)(str(report.error)) from report.error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
