"""How a thread waits under MPI, which cannot wake one: it polls, first often, then seldom."""

import threading
import time
from collections.abc import Callable

SPINS = 300  # how often a rank checks for the others, and yields its core, before it pauses
LONGEST_PAUSE = 0.001  # seconds


class Pause:
    """Pauses between two checks: a tenth of the time since the last event.

    So a short wait ends soon after its event, and a long one leaves the core to others.
    """

    def __init__(self):
        self.begin = time.monotonic()

    def __call__(self, longest: float = LONGEST_PAUSE) -> None:
        time.sleep(min((time.monotonic() - self.begin) / 10, longest))


class Polling:
    """How threads of this rank wait; see `Pace` in mailbox.py.

    stopped_everywhere  set when no rank starts anything more in the present run
    """

    def __init__(self):
        self.stopped_everywhere = threading.Event()

    def offer(self) -> None:
        """No other rank has to go first."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        pause = Pause()
        while not condition():
            pause()
        return True
