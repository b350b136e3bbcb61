"""Seeded interleavings of ranks that are threads: the same seed, the same order of events.

One rank runs at a time; whenever it is about to communicate, a generator draws who goes on, among
those that can. So a race appears again when its seed is used again, and hypothesis can search for
the smallest program that has it. (Threads that a worker starts itself are not held to turns.)
"""

import random
import threading
from collections.abc import Callable


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
