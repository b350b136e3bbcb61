"""Whether functions record what they compute, and a clock that orders what they recorded."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

tick = itertools.count(1).__next__  # larger than the order of every function applied so far


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
