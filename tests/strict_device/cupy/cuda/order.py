"""Find races between streams by vector clocks: only streams and events order a device's work.

Not a part of CuPy. The stand-in does all work at once; this finds what a GPU might do in another
order. Each stream has a clock: how many operations of every stream are done before its next one.
An event keeps the clock of the stream that records it. A stream that waits for the event merges it
into its own, and so does the host when it waits for a stream or an event. If two operations use the
same bytes, and one of them writes, the earlier must be in the clock of the later. Otherwise it is a
race, and an error.

The host is one here, for all threads: that misses races, and invents none. The null stream and the
streams that are not non-blocking wait for each other. Where a process has only null streams, and no
memory that others see, all has an order, and nothing is recorded.
"""

import sys
import threading
from collections import defaultdict

LOCK = threading.RLock()
CLOCKS: dict[tuple, dict[tuple, int]] = defaultdict(dict)  # by stream: {stream: its works}
HOST: dict[tuple, int] = {}
BLOCKING: set[tuple] = set()
FOUND: list[str] = []  # races that were found where no error can be raised
SEEN: dict[tuple, int] = {}  # how often the host had waited when a stream learned what it knows
waits = alive = 0  # how often the host has waited; streams besides the null streams
active = False  # whether there is one; when the last of them is gone, `era` begins anew
era = 0


class Race(RuntimeError):
    """Two works use the same memory, in no order."""


def learn(clock: dict, other: dict) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def count_streams(more: int) -> None:
    """Note a stream that is made, or destroyed: with the last one, earlier uses are forgotten."""
    global active, alive, era
    with LOCK:
        alive += more
        active = alive > 0
        era += not active


def host_learns(clock: dict) -> None:
    global waits
    waits += 1
    learn(HOST, clock)


def work(stream: tuple) -> dict:
    """Return the clock of a stream at its next work, which this begins."""
    clock = CLOCKS[stream]
    if SEEN.get(stream) != waits:
        SEEN[stream] = waits
        learn(clock, HOST)
    device, number = stream
    for other in list(BLOCKING) if BLOCKING else ():
        if other[0] == device and (number == 0 or stream in BLOCKING):
            learn(clock, CLOCKS[other if number == 0 else (device, 0)])
    clock[stream] = clock.get(stream, 0) + 1
    return clock


def between(device: int, other: int) -> None:
    """Let the null streams of two devices wait for each other, as a copy between them does.

    CUDA's programming guide, "Peer-to-Peer Memory Copy": such a copy in the null stream starts when
    all earlier work of both devices is done, and ends before any later one starts.
    """
    for one, two in ((device, other), (other, device)):
        learn(CLOCKS[one, 0], CLOCKS[two, 0])


class Uses:
    """The latest uses of the bytes of an allocation: (begin, end, stream, tick, writes)."""

    def __init__(self):
        self.uses, self.era = [], era

    def add(self, begin: int, end: int, stream: tuple, writes: bool) -> int:
        """Record a use of these bytes, and return its tick; raise Race if it is in no order.

        A use makes earlier ones of the same stream superfluous, if it covers them and is as strong.
        """
        if self.era != era:
            self.uses, self.era = [], era
        clock, kept = work(stream), []
        for use in self.uses:
            first, last, other, tick, wrote = use
            apart = last <= begin or end <= first
            if not apart and (wrote or writes) and clock.get(other, 0) < tick:
                raise Race(
                    f"stream {stream} {'writes' if writes else 'reads'} memory that stream {other} "
                    f"{'writes' if wrote else 'reads'}; neither waits for the other"
                )
            covered = begin <= first and last <= end and other == stream and writes >= wrote
            if not covered and (len(self.uses) < 64 or HOST.get(other, 0) < tick):
                kept.append(use)
        self.uses = [*kept, (begin, end, stream, clock[stream], writes)]
        return clock[stream]

    def freed(self, stream: tuple) -> None:
        """Find works of other streams that the stream which gets the memory next may not know."""
        clock = work(stream)
        for *_, other, tick, wrote in self.uses if self.era == era else ():
            if clock.get(other, 0) < tick:
                note(
                    f"memory of stream {stream} is released, and stream {other} still "
                    f"{'writes' if wrote else 'reads'} it"
                )
                return


def note(text: str) -> None:
    """Print what is wrong where no error can be raised; the next work raises it, too."""
    FOUND.append(text)
    print("strict device:", text, file=sys.stderr)


def raise_found() -> None:
    """Raise what was found where an array died."""
    if FOUND:
        raise Race(FOUND.pop())
