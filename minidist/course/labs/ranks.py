"""What the probes of several labs share: ranks that are threads, and refusals."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

from minidist import run


def on_ranks(worker, size: int, log=None) -> dict:
    """Call worker(group) -> {name: array or None}; return {"name on rank r": its array}."""
    found = run(worker, size, transport="thread", timeout=10, log=log)
    return {
        f"{name} on rank {r}": value
        for r, mine in enumerate(found)
        for name, value in mine.items()
        if value is not None
    }


def each_rank(name: str, count: Callable = int, around: Callable = nullcontext):
    """Make a probe of a worker(group, **given): count(given[name]) ranks call it.

    around  makes the context of all of them
    """

    def probe_of(worker):
        @wraps(worker)
        def probe(**given):
            with around():
                return on_ranks(lambda group: worker(group, **given), count(given[name]))

        return probe

    return probe_of


def refused(call, *arguments, **named) -> bool:
    """Return whether a call raises a ValueError."""
    try:
        call(*arguments, **named)
    except ValueError:
        return True
    return False
