"""Where the messages of one rank arrive and wait to be received; both transports deliver here."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from minidist.comm.diagnosis import Wait, call_site


class Stopped(BaseException):
    """Raised in a rank that waits while the run is torn down; `except Exception` misses it."""


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on number or size but memory."""

    def __init__(self):
        self.messages: dict[tuple, deque] = {}
        self.arrived = threading.Condition()
        self.waits: dict[int, Wait] = {}
        self.closed = False
        self.turns = None  # this rank's part of an interleaving, if there is one
        self.count = 0  # messages that ever arrived

    def put(self, source: int, key, message) -> None:
        with self.arrived:
            self.messages.setdefault((source, key), deque()).append(message)
            self.count += 1
            self.arrived.notify_all()

    def take(self, source: int, key, operation: str) -> Any:
        """Return the oldest message of `key` from `source`, waiting for it if need be."""

        def missing():
            return [] if (source, key) in self.messages else [source]

        def ready():
            return not missing() or self.closed

        self.offer_turn()
        if not ready():
            with self.shown(Wait(operation, missing, call_site())):
                self.wait_until(ready)
        with self.arrived:
            self.check_open()
            queue = self.messages[source, key]
            message = queue.popleft()
            if not queue:
                del self.messages[source, key]
            return message

    @contextmanager
    def shown(self, wait: Wait):
        """Let it be known that this thread waits."""
        thread = threading.get_ident()
        self.waits[thread] = wait
        try:
            yield
        finally:
            del self.waits[thread]

    def offer_turn(self) -> None:
        if self.turns is not None:
            self.turns.offer()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for a message, or the close, that makes `ready()` true."""
        if self.turns is None or not self.turns.wait_until(ready):
            with self.arrived:
                self.arrived.wait_for(ready)

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
