"""One thread of a rank at a time in the collectives of a group; a second one fails the run.

The ranks of a group meet in the order of their calls, and two threads have no common order: what
one calls on this rank could meet what the other calls on the next. The error must not be lost with
the thread that gets it. So it closes the rank's mailbox: every thread of the rank that communicates
gets it, too, and so does the run, even if the worker returns.
"""

import threading
from collections.abc import Callable
from functools import wraps

from minidist.comm.diagnosis import call_site


def collective(operation: Callable) -> Callable:
    """Let a method of Group be called by one thread at a time, together with all others like it."""

    @wraps(operation)
    def call(group, *args, **kwargs):
        if not group.in_collective.acquire(blocking=False):
            group.mailbox.close(_misuse(group, operation.__name__))
            group.mailbox.check_open(group.run)  # raises it
        try:
            return operation(group, *args, **kwargs)
        finally:
            group.in_collective.release()

    return call


def _misuse(group, operation: str) -> ValueError:
    return ValueError(
        f"rank {group.endpoint.rank} called {operation} at {call_site()} in thread "
        f"{threading.current_thread().name!r} while another of its threads was in a collective of "
        "the same group; give each thread a group of its own: group.split(0), called before the "
        "threads start"
    )
