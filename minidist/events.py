"""An optional log of events: which rank did what, when, and how many bytes it moved.

Times are seconds of the machine's monotonic clock, which all its processes share, so a log made by
several ranks can be read as one. (Events of another machine are moved to the clock of process 0:
comm/mpi/transport.py. A simulator's clocks have their own unit.)

A GPU does its work long after the host has asked for it. So a log may have the GPU's own clock: its
moments are marks in the GPU's queue of work. `in_seconds` turns them into times when all is done.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that a thread of a rank did from `start` to `end`.

    name      the operation: "all_reduce", "backward", "forward 3"
    category  "communication" or "compute"
    bytes     payload bytes that this rank sent during the event
    """

    rank: int
    name: str
    start: float
    end: float
    category: str = "compute"
    bytes: int = 0
    thread: str = "main"

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Clock:
    """The machine's monotonic clock; backend.DeviceClock is the clock of a GPU."""

    def now(self) -> Any:
        """Return this moment, which `seconds` understands."""
        return time.monotonic()

    def seconds(self, moment: Any) -> float:
        """Return a moment in seconds; wait for it if it has not come yet."""
        return moment


@dataclass
class EventLog:
    """Events in the order in which they ended, on each rank; give it to `run(..., log=log)`.

    In a worker, `group.log` is the rank's own log, or None. The group logs its communication there;
    `span` adds what the worker does.

    unit   unit of the times: "s", or the unit of a simulator's durations
    clock  gives the times of new events; with a GPU's, call `in_seconds` before you read them
    """

    events: list[Event] = field(default_factory=list)
    rank: int = 0
    unit: str = "s"
    clock: Clock = field(default_factory=Clock, repr=False, compare=False)

    @contextmanager
    def span(self, name: str, category: str = "compute") -> Iterator[None]:
        """Log what happens inside the `with` block, even if it raises."""
        start = self.clock.now()
        try:
            yield
        finally:
            self.add(name, start, category)

    def add(self, name: str, start: Any, category: str = "compute", bytes: int = 0) -> None:
        """Log what began at the moment `start` and ends now, on this thread."""
        current = threading.current_thread()
        own = current is threading.main_thread() or current.name.startswith("rank ")
        thread = "main" if own else current.name
        self.events.append(Event(self.rank, name, start, self.clock.now(), category, bytes, thread))

    def in_seconds(self) -> "EventLog":
        """Return the same events with times in seconds; wait until a GPU has done its work."""
        if type(self.clock) is Clock:
            return self
        seconds = self.clock.seconds
        events = [replace(e, start=seconds(e.start), end=seconds(e.end)) for e in self.events]
        return EventLog(events, self.rank, self.unit)

    def extend(self, other: "EventLog") -> None:
        self.events.extend(other.events)

    def later(self, seconds: float) -> "EventLog":
        """Return the same events by a clock that is `seconds` ahead."""
        moved = [replace(e, start=e.start + seconds, end=e.end + seconds) for e in self.events]
        return EventLog(moved, self.rank, self.unit)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def from_zero(self) -> "EventLog":
        """Return the same events with the earliest start as time 0, in order of their starts."""
        zero = min((event.start for event in self.events), default=0.0)
        events = self.later(-zero).events
        events.sort(key=lambda e: (e.start, e.rank, e.thread))
        return EventLog(events, unit=self.unit)
