"""Ranks that are threads, for the probes of several labs."""

from minidist import run


def on_ranks(worker, size: int, log=None) -> dict:
    """Call worker(group) -> {name: array or None}; return {"name r": what rank r found}."""
    found = run(worker, size, transport="thread", timeout=10, log=log)
    return {
        f"{name} {r}": value
        for r, mine in enumerate(found)
        for name, value in mine.items()
        if value is not None
    }
