"""Where the messages of one rank arrive and wait to be received; both transports deliver here."""

import threading
from collections import Counter, deque
from contextlib import contextmanager

from minidist.comm.board import GIVE_WAY
from minidist.comm.diagnosis import Wait, call_site
from minidist.comm.message import Key, Message
from minidist.comm.ring_buffer import RingReader


class Stopped(BaseException):
    """Raised in a thread whose run has ended or is torn down; `except Exception` misses it."""


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on number or size but memory.

    Some are still in the ring of their source, until a thread of this rank looks: one that waits
    for them, or whoever needs to know what has arrived. A thread that has looked in vain for a
    moment asks the source to wake it, looks once more, and sleeps. The first message after that
    makes the source call for `stir`, whoever takes it; then all who sleep look, and ask again.

    rings  {source: the ring of its small messages}
    looks  how often to look before sleeping
    """

    def __init__(self):
        self.rings: dict[int, RingReader] = {}
        self.looks = 0
        self.messages: dict[tuple, deque] = {}
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)
        self.waits: dict[int, Wait] = {}
        self.closed: BaseException | None = None  # why nobody communicates here any more
        self.over = -1  # the last run that has ended
        self.turns = None  # this rank's part of an interleaving, if there is one
        self.count = 0  # messages that ever arrived
        self.received: Counter = Counter()  # messages that were taken in this run

    def put(self, source: int, key: Key, message: Message) -> None:
        """Add a message that has come past the ring, between those that were sent around it."""
        with self.lock:
            ring = self.rings.get(source)
            if ring is not None:
                self._drain(source, ring)
                ring.pass_by()
            self._add(source, key, message)
            self.arrived.notify_all()

    def stir(self) -> None:
        """Empty all rings; let those who sleep look for themselves, and ask to be woken again."""
        with self.lock:
            for source, ring in self.rings.items():
                self._drain(source, ring)
            self.arrived.notify_all()

    def _drain(
        self, source: int, ring: RingReader | None, wanted: Key | None = None
    ) -> Message | None:
        """Take what the ring has, up to a message that comes another way; with the lock held.

        Stop early at a message of key `wanted`, and return it.
        """
        while ring is not None and (found := ring.take()) is not None:
            key, message = found
            if key == wanted:
                self.count += 1
                return message
            self._add(source, key, message)
        return None

    def _add(self, source: int, key: Key, message: Message) -> None:
        self.messages.setdefault((source, key), deque()).append(message)
        self.count += 1

    def take(self, source: int, key: Key, operation: str) -> Message:
        """Return the oldest message of `key` from `source`, waiting for it if need be."""
        where, ring = (source, key), self.rings.get(source)
        self.enter(key.run)
        message = self._pop(where, ring)
        if message is None and ring is not None:
            message = self._look_for(where, ring)
        if message is None:
            name = f"{operation}(tag={key.number})" if key.kind == "message" else operation
            wait = Wait(name, lambda: [] if where in self.messages else [source], call_site())
            with self.shown(wait):
                while message is None:  # another thread of this rank may be faster
                    self._sleep_until(key.run, [(where, ring)])
                    self.check_open(key.run)
                    message = self._pop(where, ring)
        return message

    def take_any(self, sources: list[int], key: Key, operation: str) -> tuple[int, Message]:
        """Return (source, message) of `key`, waiting for one if need be.

        Where several sources have one, it is that of the first of them in the list.
        """
        places = [((source, key), self.rings.get(source)) for source in sources]
        self.enter(key.run)
        found = self._pop_any(places) or self._look_for_any(places)
        if found is None:
            wait = Wait(
                f"{operation}(tag={key.number})",
                lambda: [] if any(where in self.messages for where, _ in places) else sources,
                call_site(),
            )
            with self.shown(wait):
                while found is None:
                    self._sleep_until(key.run, places)
                    self.check_open(key.run)
                    found = self._pop_any(places)
        return found

    def _pop_any(self, places: list[tuple]) -> tuple[int, Message] | None:
        for where, ring in places:
            if (message := self._pop(where, ring)) is not None:
                return where[0], message
        return None

    def _look_for_any(self, places: list[tuple]) -> tuple[int, Message] | None:
        """Return what comes while we look for it, else None; `_look_for` at several rings."""
        rings, seen = [ring for _, ring in places if ring is not None], None
        for _ in range(self.looks if rings else 0):
            if any(ring.stirs() for ring in rings) or self.count != seen:
                seen = self.count
                found = self._pop_any(places)
                if found is not None or any(ring.stirs() for ring in rings):
                    return found
            GIVE_WAY()
        return None

    def _look_for(self, where: tuple, ring: RingReader) -> Message | None:
        """Return the message if it comes while we look for it, else None."""
        seen = None
        for _ in range(self.looks):
            if ring.stirs() or self.count != seen:
                seen = self.count
                message = self._pop(where, ring)
                if message is not None or ring.stirs():  # a socket's reader needs this core
                    return message
            GIVE_WAY()  # the sender may need this core
        return None

    def _pop(self, where: tuple, ring: RingReader | None) -> Message | None:
        """Return the oldest message if it is there, else None."""
        with self.lock:
            queue = self.messages.get(where)
            if queue is None:
                message = self._drain(where[0], ring, where[1])
            else:
                message = queue.popleft()
                if not queue:
                    del self.messages[where]
            if message is not None:
                source, key = where
                if key.kind == "message":
                    self.received[source, key.number] += 1
            return message

    def _sleep_until(self, run: int, places: list[tuple[tuple, RingReader | None]]) -> None:
        """Wait for a message at one of these places, or for the end of the run."""

        def ready():
            for where, ring in places:
                if ring is not None and where not in self.messages:
                    ring.fall_asleep()
                    self._drain(where[0], ring)
            return self.is_over(run) or any(where in self.messages for where, _ in places)

        if self.turns is None or not self.turns.wait_until(ready):
            with self.lock:
                self.arrived.wait_for(ready)

    @contextmanager
    def shown(self, wait: Wait):
        """Let it be known that this thread waits."""
        thread = threading.get_ident()
        self.waits[thread] = wait
        try:
            yield
        finally:
            del self.waits[thread]

    def enter(self, run: int) -> None:
        """Begin to communicate: perhaps another rank goes first, or the run is over."""
        if self.turns is not None:
            self.turns.offer()
        self.check_open(run)

    def is_over(self, run: int) -> bool:
        return self.closed is not None or run <= self.over

    def check_open(self, run: int) -> None:
        """Stop this thread if the run is over, or if nobody communicates here any more."""
        if self.closed is not None:
            raise type(self.closed)(*self.closed.args)  # one for each thread that it stops
        if run <= self.over:
            raise Stopped(
                "this group is of a run that has ended; use the one that this run gave its worker"
            )

    def close(self, why: BaseException) -> None:
        """Stop every thread that waits here, and every one that comes; the first reason counts."""
        with self.lock:
            self.closed = self.closed or why
            self.arrived.notify_all()

    def end(self, run: int) -> None:
        """Stop every thread that communicates in this run, now or later."""
        with self.lock:
            self.over = run
            self.arrived.notify_all()

    def drop_runs_before(self, run: int) -> None:
        """Forget the messages of earlier runs."""
        self.received.clear()
        self.stir()
        with self.lock:
            for where in [where for where in self.messages if where[1].run < run]:
                del self.messages[where]
