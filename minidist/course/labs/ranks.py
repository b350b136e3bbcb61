"""What several labs run beside a student's code: ranks that are threads, and refusals."""

from collections.abc import Callable
from functools import wraps
from inspect import signature

from minidist import run


def on_ranks(worker, size: int, log=None) -> list:
    """Call worker(group) on ranks that are threads; return what each returns."""
    return run(worker, size, transport="thread", timeout=10, log=log)


def each_rank(name: str, count: Callable = int):
    """Let a worker(group, **given) be called without its group, on count(given[name]) ranks."""

    def of(worker):
        @wraps(worker)
        def on_all(**given):
            return on_ranks(lambda group: worker(group, **given), count(given[name]))

        _, *parameters = signature(worker).parameters.values()
        on_all.__signature__ = signature(worker).replace(parameters=parameters)
        return on_all

    return of


def refused(call, *arguments, **named) -> bool:
    """Return whether a call raises a ValueError."""
    try:
        call(*arguments, **named)
    except ValueError:
        return True
    return False
