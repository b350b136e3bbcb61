"""Endpoint: what one rank sees of a transport."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minidist.comm.board import BLOCK, Alarm, Board
from minidist.comm.diagnosis import Snapshot, snapshot
from minidist.comm.group import Group
from minidist.comm.logged_group import LoggedGroup
from minidist.comm.mailbox import Mailbox
from minidist.comm.message import Key, Message
from minidist.comm.shared_memory import SharedMemory
from minidist.events import EventLog


@dataclass
class Endpoint:
    """Messages, shared memory and an alarm clock.

    deliver(to, key, message)  the transport's part of a send; the array has been copied when it
                               returns
    spins                      how often to check for the others before sleeping; 0: sleep at once,
                               as threads do, which share one interpreter
    own_process                whether the rank is a process, and not one thread of the caller's
    sent                       {(to, tag): messages} of this run, those of collectives left out
    posted                     messages ever sent
    run, worker, log           the number of the run; the thread that runs the worker; its events
    blocks                     of the boards of groups that this run has made by `split`
    """

    rank: int
    size: int
    device: str
    mailbox: Mailbox
    memory: SharedMemory
    alarm: Alarm
    spins: int
    deliver: Callable[[int, Key, Message], None]
    own_process: bool = True
    sent: Counter = field(default_factory=Counter)
    posted: int = 0
    run: int = 0
    worker: int | None = None
    log: EventLog | None = None
    blocks: list = field(default_factory=list)
    counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self.block = self._zeros()  # the first thing in every region

    def _zeros(self) -> np.ndarray:
        block = self.memory.empty(BLOCK, np.uint8)
        block[:] = 0
        return block

    def new_block(self) -> np.ndarray:
        """Return memory for this rank's part of a Board."""
        self.blocks.append(self._zeros())  # a slow rank may still read it when its group is gone
        return self.blocks[-1]

    def begin(self, run: int, logged: bool = False) -> Group:
        """Start a run, when all ranks have ended the one before. Return the group of all ranks."""
        self.run, self.log = run, EventLog(rank=self.rank) if logged else None
        self.mailbox.drop_runs_before(run)
        self.sent.clear()
        self.blocks.clear()
        self.worker = threading.get_ident()
        members = list(range(self.size))
        board = Board(self, [rank * self.memory.region for rank in members], members, self.block)
        return (LoggedGroup if logged else Group)(self, members, (), board)

    def end(self) -> None:
        """End the run on this rank: no thread that is left over communicates in it any more."""
        self.mailbox.end(self.run)

    def post(self, to: int, key: Key, message: Message) -> None:
        self.mailbox.enter(key.run)
        with self.counting:
            self.posted += 1
            if key.kind == "message":
                self.sent[to, key.number] += 1
        self.deliver(to, key, message)

    def unreceived(self) -> dict[tuple[int, int, int], int]:
        """Return {(source, to, tag): messages sent minus received} of this run, as this rank knows.

        Summed over all ranks, what is left was never received.
        """
        known = Counter({(self.rank, to, tag): n for (to, tag), n in dict(self.sent).items()})
        for (source, tag), n in dict(self.mailbox.received).items():
            known[source, self.rank, tag] -= n
        return dict(known)

    def snapshot(self) -> Snapshot:
        """Return what this rank waits for at this moment."""
        mailbox = self.mailbox
        mailbox.notify()
        return snapshot(mailbox.waits, self.worker, self.own_process, self.posted, mailbox.count)
