"""One thread of a rank at a time in the collectives of a group; a second one fails the run.

The ranks of a group match calls by their order, and two threads have no common order: a call of one
thread on this rank could meet a call of the other thread on the next rank. The error must not be
lost with the thread that gets it. So the rank fails: every thread of it that communicates gets the
error, and so does the run, even if the worker returns.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from minidist.comm.diagnosis import call_site

if TYPE_CHECKING:
    from minidist.comm.group import Group


def collective(operation: Callable) -> Callable:
    """Let one thread at a time call this method of Group, or any other one that is wrapped so."""

    @wraps(operation)
    def call(group: "Group", *args, **kwargs):
        if not group.in_collective.acquire(blocking=False):
            group.fabric.fail(_misuse(group, operation.__name__))
        try:
            return operation(group, *args, **kwargs)
        finally:
            group.in_collective.release()

    return call


def _misuse(group: "Group", operation: str) -> ValueError:
    return ValueError(
        f"rank {group.fabric.rank} called {operation} at {call_site()} in thread "
        f"{threading.current_thread().name!r} while another of its threads was in a collective of "
        "the same group; give each thread a group of its own: group.split(0), called before the "
        "threads start"
    )
