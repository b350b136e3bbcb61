"""Where the messages of one rank arrive and wait to be received; every transport delivers here."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from minidist.comm.diagnosis import Wait, call_site
from minidist.comm.local.limits import GIVE_WAY
from minidist.comm.message import Key, Message

CHECKS = 8  # of sources before a thread that spins gives its core away, which takes longer


class Stopped(BaseException):
    """Raised in a thread whose run has ended or is torn down; `except Exception` misses it."""


class Polled(Protocol):
    """The messages of one source that this rank fetches itself, in the order they were sent."""

    def poll(self) -> tuple[Key, Message] | None:
        """Return the next (key, message), or None if it is not here yet; one thread at a time."""

    def has_pending(self, checks: int = 1) -> bool:
        """Return whether a message was sent that `poll` has not returned; it may be on its way.

        checks  how often to look, where that takes less time than a call does
        """

    def request_wake_up(self) -> None:
        """Make the next send lead to `Mailbox.notify`. Poll once more before sleeping."""


class Pace(Protocol):
    """How threads of a rank wait, other than by sleeping until `Mailbox.notify` wakes them."""

    def offer(self) -> None:
        """Let another rank go first, perhaps; called before a thread communicates."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Return True when the condition holds; False, at once, if this thread has to sleep."""


class Mailbox:
    """Messages by (source, key), first in, first out; no bound on number or size but memory.

    A transport either puts a message here, or keeps it until a thread of this rank polls: a thread
    that waits for it, or one that needs to know what has arrived. A thread that has polled for a
    moment without success requests to be woken, polls once more, and sleeps. The next message then
    makes the transport call `notify`; all threads that sleep poll, and request it again.

    polled  {source: where its messages are polled}
    spins   how often to poll before sleeping
    pace    how threads wait, if they do not sleep: in an interleaving, or where nothing wakes them
    """

    def __init__(self) -> None:
        self.polled: dict[int, Polled] = {}
        self.spins = 0
        self.messages: dict[tuple[int, Key], deque[Message]] = {}
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)
        self.waits: dict[int, Wait] = {}
        self.closed: BaseException | None = None  # why nobody communicates here any more
        self.over = -1  # the last run that has ended
        self.pace: Pace | None = None
        self.count = 0  # messages that ever arrived
        # {(source, tag): messages} of this run; a Counter takes twice as long.
        self.received = defaultdict[tuple[int, int], int](int)

    # Delivering.

    def put(self, source: int, key: Key, message: Message) -> None:
        """Add a message."""
        with self.lock:
            self._add(source, key, message)
            self.arrived.notify_all()

    def put_copy(self, source: int, key: Key, message: Message) -> None:
        """Add a message that this rank sends to itself; what was on a GPU has been copied."""
        array, was_on_gpu = message
        self.put(source, key, (array if was_on_gpu else array.copy(), was_on_gpu))

    def notify(self) -> None:
        """Poll every source; wake the threads that sleep, which check for themselves."""
        with self.lock:
            for source in self.polled:
                self._drain(source)
            self.arrived.notify_all()

    def _drain(self, source: int, wanted: Key | None = None) -> Message | None:
        """Take what the source has, with the lock held; stop at key `wanted` and return that."""
        polled = self.polled.get(source)
        while polled is not None and (found := polled.poll()) is not None:
            key, message = found
            if key == wanted:
                self.count += 1
                return message
            self._add(source, key, message)
        return None

    def _add(self, source: int, key: Key, message: Message) -> None:
        self.messages.setdefault((source, key), deque()).append(message)
        self.count += 1

    # Receiving.

    def take(self, sources: list[int], key: Key, operation: str) -> tuple[int, Message]:
        """Return (source, message): the oldest message of `key`; wait for it if need be.

        Where several sources have one, it is from the first of them in the list.
        """
        self.enter(key.run)
        seen = self.count
        found = self._pop(sources, key) or self._spin(sources, key, seen)
        if found is None:
            wait = Wait(
                f"{operation}(tag={key.number})" if key.kind == "message" else operation,
                lambda: [] if self._has_any(sources, key) else sources,
                call_site(),
            )
            with self.waiting(wait):
                while found is None:  # another thread of this rank may be faster
                    self._sleep_until(sources, key)
                    self.check_open(key.run)
                    found = self._pop(sources, key)
        return found

    def _pop(self, sources: list[int], key: Key) -> tuple[int, Message] | None:
        """Return the message that `take` is to return, if it is here."""
        self.lock.acquire()  # `with` would take twice as long
        try:
            for source in sources:
                queue = self.messages.get((source, key))
                if queue is None:
                    message = self._drain(source, key)
                    if message is None:
                        continue
                else:
                    message = queue.popleft()
                    if not queue:
                        del self.messages[source, key]
                if key.kind == "message":
                    self.received[source, key.number] += 1
                return source, message
            return None
        finally:
            self.lock.release()

    def _has_any(self, sources: list[int], key: Key) -> bool:
        return any((source, key) in self.messages for source in sources)

    def _sleep_until(self, sources: list[int], key: Key) -> None:
        """Wait for a message of `key` from one of these sources, or for the end of the run."""

        def ready() -> bool:
            for source in sources:
                if source in self.polled and (source, key) not in self.messages:
                    self.polled[source].request_wake_up()
                    self._drain(source)
            return self.is_over(key.run) or self._has_any(sources, key)

        def ready_now() -> bool:
            with self.lock:
                return ready()

        if self.pace is None or not self.pace.wait_until(ready_now):
            with self.lock:
                self.arrived.wait_for(ready)

    # Fast path: skip at first reading. Waking a sleeping thread takes longer than most messages.

    def _spin(self, sources: list[int], key: Key, seen: int) -> tuple[int, Message] | None:
        """Return the message if it comes while we poll `spins` times, else None.

        seen  how many messages had arrived before the caller last checked
        """
        polled = [self.polled[source] for source in sources if source in self.polled]
        if not polled:
            return None
        checks = max(1, CHECKS // len(polled))
        for _ in range(self.spins):
            if _any_has_pending(polled, checks) or self.count != seen:
                seen = self.count
                found = self._pop(sources, key)
                if found is not None or _any_has_pending(polled):
                    return found  # if None: a socket's reader needs this core
            GIVE_WAY()  # the sender may need this core
        return None

    # Diagnosis, and the end of runs.

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Record that this thread waits."""
        thread = threading.get_ident()
        self.waits[thread] = wait
        try:
            yield
        finally:
            del self.waits[thread]

    def enter(self, run: int) -> None:
        """Let another rank go first if an interleaving asks for it; raise if the run is over."""
        if self.pace is not None:
            self.pace.offer()
        if self.closed is not None or run <= self.over:
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
        self.notify()
        with self.lock:
            for source, key in [where for where in self.messages if where[1].run < run]:
                del self.messages[source, key]


def _any_has_pending(polled: list[Polled], checks: int = 1) -> bool:
    for one in polled:  # any() over a generator takes four times as long for one
        if one.has_pending(checks):
            return True
    return False
