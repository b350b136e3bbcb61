"""Where the messages of one rank arrive and wait to be received; both transports deliver here."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class Stopped(BaseException):
    """Raised in a rank that waits while the run is being torn down: no failure of its own, so no
    `except Exception` sees it.
    """


@dataclass
class Wait:
    """What a thread of a rank waits for: an operation, the ranks that it needs, since when."""

    operation: str
    sources: Callable[[], list[int]]
    since: float = field(default_factory=time.monotonic)

    def __str__(self):
        ranks = self.sources()
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return f"waits in {self.operation} for {who} since {time.monotonic() - self.since:.1f} s"


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on number or size but memory."""

    def __init__(self):
        self.messages: dict[tuple, deque] = {}
        self.arrived = threading.Condition()
        self.waits: dict[int, Wait] = {}
        self.closed = False

    def put(self, source: int, key, message) -> None:
        with self.arrived:
            self.messages.setdefault((source, key), deque()).append(message)
            self.arrived.notify_all()

    def take(self, source: int, key, operation: str) -> Any:
        """Return the oldest message of `key` from `source`, waiting for it if need be."""
        with self.arrived:
            if (source, key) not in self.messages and not self.closed:
                with self.waiting_for(operation, lambda: [source]):
                    self.arrived.wait_for(lambda: (source, key) in self.messages or self.closed)
            self.check_open()
            queue = self.messages[source, key]
            message = queue.popleft()
            if not queue:
                del self.messages[source, key]
            return message

    @contextmanager
    def waiting_for(self, operation: str, sources: Callable[[], list[int]]):
        """Let it be known that this thread waits."""
        thread = threading.get_ident()
        self.waits[thread] = Wait(operation, sources)
        try:
            yield
        finally:
            del self.waits[thread]

    def check_open(self) -> None:
        if self.closed:
            raise Stopped

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
        return [str(wait) for wait in list(self.waits.values())]
