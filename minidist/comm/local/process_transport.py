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
`hosts` simulates several hosts, as in thread_transport.py.

    process_transport.py    the caller's side: starts the ranks, gives orders, collects reports
    fork_server.py          how a process starts
    rank_process.py         a rank's side
"""

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from minidist.comm.diagnosis import Snapshots
from minidist.comm.fabric import Connect
from minidist.comm.local.fork_server import (
    Descriptors,
    ctrl_c_waits,
    nameless_main,
    start_method,
)
from minidist.comm.local.limits import check_size, refuse_interleaving
from minidist.comm.local.mailbox_fabric import MailboxFabric
from minidist.comm.local.rank_process import serve
from minidist.comm.local.report import Report, unpack
from minidist.comm.local.shared_memory import create_file
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.comm.local.wiring import Place, numbered
from minidist.errors import WrongInput


class ProcessRanks:
    """The caller's side: one process per rank, and a control connection to each."""

    def __init__(
        self,
        size: int,
        device: str,
        interleaving: int | None = None,
        connect: Connect[MailboxFabric] = SharedMemoryCommunicator.connect,
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

    def _start(
        self, device: str, connect: Connect[MailboxFabric], hosts: list[int], theirs: ExitStack
    ) -> None:
        context = start_method()
        shared, alarms = Descriptors([create_file(self.size)]), []
        theirs.callback(shared.close)
        for _ in range(self.size):
            reader, writer = os.pipe()
            shared.numbers.append(writer)
            alarms.append(Descriptors([reader]))
            theirs.callback(alarms[-1].close)
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
                        args=(place, end, peers[rank], shared, alarms[rank]),
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

    def finish(self) -> None:
        """End a run in which every rank has reported."""

    def stop(self, patience: float = 0.0) -> None:
        """End every rank: by itself if it is idle within `patience` seconds, else by force."""
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
