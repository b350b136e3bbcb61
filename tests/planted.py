"""Mistakes of the register, on ranks that are processes."""

from collections.abc import Callable

from minidist.verify.mistakes.register import module_of, planted

__all__ = ["mistaken", "module_of", "planted"]


def mistaken(name: str, worker: Callable) -> Callable:
    """Return a worker that does the same with a mistake; for ranks that are processes."""

    def wrong(group, *arguments, **options):
        with planted(name):
            return worker(group, *arguments, **options)

    return wrong
