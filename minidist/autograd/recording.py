"""Whether functions record what they compute, and a clock that orders what they recorded."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

tick = itertools.count(1).__next__  # larger than the order of every function applied so far


class Since:
    """When a copy, a cache or a gathered array was made, on the clock of `tick`.

    Whoever gathers, copies or caches early keeps one of these, and asks it before each use.

    last  () -> when its source last changed
    """

    def __init__(self, last: Callable[[], int]):
        self.last = last
        self.follow()

    def behind(self) -> bool:
        """Return whether its source has changed since."""
        return self.last() > self.at

    def follow(self) -> None:
        """Record that it is made anew, from what there is now."""
        self.at = tick()

    def __getstate__(self) -> dict:
        # A copy of parameters forgets when they changed, and may be in a process with another clock
        return {"last": self.last, "at": -1 if self.behind() else 0}


class Switch(threading.local):
    on = True  # one switch per thread, because ranks may be threads


switch = Switch()


@contextmanager
def recording(on: bool) -> Iterator[None]:
    """Switch the recording of computations on or off inside this context."""
    before, switch.on = switch.on, on
    try:
        yield
    finally:
        switch.on = before


def no_grad() -> AbstractContextManager[None]:
    """Compute without recording inside this context: results do not require gradients."""
    return recording(False)


def is_recording() -> bool:
    return switch.on
