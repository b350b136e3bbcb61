"""Where the messages of one rank arrive and wait to be received; both transports deliver here."""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from minidist.comm.group import Group


class Stopped(BaseException):
    """Raised in a rank that waits while the run is being torn down; no failure of its own, so no
    `except Exception` sees it.
    """


@dataclass
class Wait:
    """What a thread of a rank is waiting for: an operation, the world rank that should send, since
    when (monotonic).
    """

    operation: str
    source: int
    since: float = field(default_factory=time.monotonic)


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on their number or size but
    memory.
    """

    def __init__(self):
        self.messages: dict[tuple, deque] = {}
        self.arrived = threading.Condition()
        self.waits: dict[str, Wait] = {}
        self.closed = False

    def put(self, source: int, key, message) -> None:
        with self.arrived:
            self.messages.setdefault((source, key), deque()).append(message)
            self.arrived.notify_all()

    def take(self, source: int, key, operation: str) -> Any:
        """Return the oldest message of `key` from `source`, waiting for it if need be."""
        with self.arrived:
            if (source, key) not in self.messages and not self.closed:
                thread = threading.current_thread().name
                self.waits[thread] = Wait(operation, source)
                self.arrived.wait_for(lambda: (source, key) in self.messages or self.closed)
                del self.waits[thread]
            if self.closed:
                raise Stopped
            queue = self.messages[source, key]
            message = queue.popleft()
            if not queue:
                del self.messages[source, key]
            return message

    def close(self) -> None:
        """Stop every thread that waits here, and every one that comes to wait."""
        with self.arrived:
            self.closed = True
            self.arrived.notify_all()

    def drop_runs_before(self, run: int) -> None:
        """Forget the messages of earlier runs; a key begins with the run it belongs to."""
        with self.arrived:
            for where in [where for where in self.messages if where[1][0] < run]:
                del self.messages[where]

    def waiting(self) -> list[str]:
        """Describe each wait of this rank in a line."""
        with self.arrived:
            return [
                f"waits in {w.operation} for rank {w.source} since "
                f"{time.monotonic() - w.since:.1f} s"
                for w in self.waits.values()
            ]


def copy_of(message: tuple) -> tuple:
    note, array, was_on_gpu = message
    return note, array.copy(), was_on_gpu


class Endpoint:
    """What one rank sees of a transport: `post` and `take`. `deliver(to, key, message)` is the
    transport's own part.

    A message is (note, array, whether it was on a GPU); the array must be copied before `deliver`
    returns.
    """

    def __init__(self, rank: int, size: int, device: str, mailbox: Mailbox, deliver):
        self.rank, self.size, self.device = rank, size, device
        self.mailbox, self.deliver = mailbox, deliver
        self.unreceived: Counter[tuple] = Counter()

    def post(self, to: int, key, message) -> None:
        if self.mailbox.closed:
            raise Stopped
        self._count(self.rank, to, key, +1)
        self.deliver(to, key, message)

    def take(self, source: int, key, operation: str):
        message = self.mailbox.take(source, key, operation)
        self._count(source, self.rank, key, -1)
        return message

    def _count(self, source, to, key, change) -> None:
        """Keep the books of messages by (source, to, tag): summed over all ranks, what is left was
        never received.
        """
        kind, number = key[-1]
        if kind == "message":
            self.unreceived[source, to, number] += change

    def begin(self, run: int) -> Group:
        """Start a run: old messages are forgotten. Return the group of all ranks."""
        self.mailbox.drop_runs_before(run)
        self.unreceived.clear()
        return Group(self, list(range(self.size)), (run,))
