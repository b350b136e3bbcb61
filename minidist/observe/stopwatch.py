"""The median time of a call that all ranks begin together."""

from collections.abc import Callable
from statistics import median
from time import process_time, thread_time

from minidist.events import Clock


class CoreClock(Clock):
    """This thread's time on a core, whoever else wants that core."""

    def now(self) -> float:
        return thread_time()


class ProcessClock(Clock):
    """The time of all threads of this process on cores, whoever else wants those cores."""

    def now(self) -> float:
        return process_time()


def median_seconds(
    call: Callable[[], object],
    meet: Callable[[], object] = lambda: None,
    repeats: int = 15,
    clock: Clock | None = None,
) -> float:
    """Return the median seconds of call(), after one call that warms it up.

    meet   makes ranks begin together: a barrier
    clock  by default the machine's; a GPU's is read when all calls are queued
    """
    clock = clock or Clock()
    call()
    spans = []
    for _ in range(repeats):
        meet()
        start = clock.now()
        call()
        spans.append((start, clock.now()))
    return median(clock.seconds(stop) - clock.seconds(start) for start, stop in spans)


def there_and_back(rank: int, send: Callable, recv: Callable) -> Callable[[], None]:
    """Return a call in which an even rank sends to the next rank, which answers."""

    def first() -> None:
        send(rank + 1)
        recv(rank + 1)

    def second() -> None:
        recv(rank - 1)
        send(rank - 1)

    return second if rank % 2 else first
