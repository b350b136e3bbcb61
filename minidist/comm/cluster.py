"""Cluster: start ranks, hand out work, collect results, turn a failure into one error."""

import itertools
import signal
import time
import weakref

import cloudpickle

from minidist.backend import check_device
from minidist.comm.process_transport import ProcessRanks
from minidist.comm.report import Report
from minidist.comm.thread_transport import ThreadRanks
from minidist.errors import CommError, CommTimeout, RankDied, RankFailed

TRANSPORTS = {"process": ProcessRanks, "thread": ThreadRanks}


def run(worker, size: int, *args, transport="process", timeout=None, device="cpu") -> list:
    """Call worker(group, *args) on `size` ranks; return their results in rank order.

    worker     any function, also one of a script or a notebook cell: it travels by value, and so do
               args and results
    transport  "process", or "thread" for a debugger
    timeout    seconds after which the run ends in CommTimeout
    device     "cpu" or "gpu": `group.device`, where `group.empty` allocates

    Each rank's BLAS gets cores // size threads, so one rank alone uses them all: to compare numbers
    of ranks fairly, say `threadpoolctl.threadpool_limits(1)` in the worker.
    """
    with Cluster(size, transport, device) as cluster:
        return cluster.run(worker, *args, timeout=timeout)


class Cluster:
    """Ranks that stay up between runs. After a failure all have stopped; the next run starts fresh
    ones.

    Use it in a `with`, or call `close()`; at the latest the ranks end with the interpreter.
    """

    def __init__(self, size: int, transport: str = "process", device: str = "cpu"):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"a cluster has one rank or more, not {size}")
        if transport not in TRANSPORTS:
            raise ValueError(
                f"transport {transport!r} does not exist; choose one of {', '.join(TRANSPORTS)}"
            )
        check_device(device)
        self.size, self.transport, self.device = size, transport, device
        self._runs = itertools.count(1)
        self._ranks = self._finalizer = None
        self._start()

    def _start(self) -> None:
        self._ranks = TRANSPORTS[self.transport](self.size, self.device)
        self._finalizer = weakref.finalize(self, self._ranks.stop, 1.0)

    def run(self, worker, *args, timeout: float | None = None) -> list:
        """Call worker(group, *args) on every rank; return the results in rank order, or raise one
        error.

        RankDied, RankFailed (chained to the remote exception), CommTimeout, or CommError for a
        message that nobody received. After any of them, and after Ctrl-C, every rank has stopped
        and nothing is left of the run.
        """
        payload = cloudpickle.dumps((worker, args))
        if self._ranks is None:
            self._start()
        try:
            self._ranks.submit(next(self._runs), payload)
            reports = self._collect(timeout)
            self._ranks.finish()
        except BaseException:
            self._stop()
            raise
        _raise_if_unreceived(reports)
        return [reports[rank].result for rank in range(self.size)]

    def _collect(self, timeout) -> dict[int, Report]:
        deadline = None if timeout is None else time.monotonic() + timeout
        reports: dict[int, Report] = {}
        while len(reports) < self.size:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            new = self._ranks.reports(left)
            if not new and left is not None and time.monotonic() >= deadline:
                raise CommTimeout(self._describe_timeout(timeout, reports))
            reports.update(new)
            if any(report.failed or report.died for _, report in new):
                reports.update(
                    self._ranks.reports(0.05)
                )  # others that went down with it, for the precedence
                raise_first_failure(reports)
        return reports

    def _describe_timeout(self, timeout, reports) -> str:
        busy = [rank for rank in range(self.size) if rank not in reports]
        waiting = self._ranks.waiting(busy)
        rows = [
            f"  rank {rank}: {line}"
            for rank in range(self.size)
            for line in (["has finished"] if rank in reports else waiting[rank] or ["computes"])
        ]
        return "\n".join([f"not done within {timeout} s:", *rows])

    def _stop(self, patience: float = 0.0) -> None:
        if self._ranks is not None and self._finalizer.detach():
            self._ranks.stop(patience)
        self._ranks = None

    def close(self) -> None:
        """Let all ranks end. The next `run` would start new ones."""
        self._stop(patience=2.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def raise_first_failure(reports: dict[int, Report]) -> None:
    """Raise the failure that matters most: a death before an exception, a low rank before a high
    one.
    """
    for rank, report in sorted(reports.items()):
        if report.died:
            code = report.exitcode
            why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RankDied(f"rank {rank} died without a report ({why})", rank, code)
    failures = [(rank, report) for rank, report in sorted(reports.items()) if report.failed]
    for rank, report in failures:
        if not isinstance(report.error, CommError):
            raise RankFailed(f"rank {rank} failed:\n{report.traceback}", rank) from report.error
    for _, report in failures:
        raise type(report.error)(str(report.error)) from report.error


def _raise_if_unreceived(reports: dict[int, Report]) -> None:
    left: dict[tuple, int] = {}
    for report in reports.values():
        for where, count in report.unreceived.items():
            left[where] = left.get(where, 0) + count
    lost = [
        f"{n} from rank {a} to rank {b} with tag {tag}"
        for (a, b, tag), n in sorted(left.items())
        if n
    ]
    if lost:
        raise CommError(f"messages that nobody received: {'; '.join(lost)}")
