"""Every strategy as one record, and what its checks need: workers, cases, closed forms.

A worker starts from the weights of a single-device model, takes one batch, and returns the
gradients of its rank. `record.py` describes a record, `cases.py` has what workers share; every
other file here ends in a list STRATEGIES. To add a strategy, add a record to the file of its axis,
or add a file: all files are read, and records are ordered by their lessons.
"""

from importlib import import_module
from pkgutil import iter_modules

from minidist.tools.strategies.cases import INPUT, Case, Outcome, Split, collect, one_device
from minidist.tools.strategies.record import Costs, Models, Strategy

__all__ = [
    "INPUT",
    "STRATEGIES",
    "Case",
    "Costs",
    "Models",
    "Outcome",
    "Split",
    "Strategy",
    "collect",
    "one_device",
]


def _records() -> dict[str, Strategy]:
    """Return {name: record} of all files but the two that define what a record is."""
    names = {module.name for module in iter_modules(__path__)} - {"cases", "record"}
    files = [import_module(f"{__name__}.{name}") for name in sorted(names)]
    found: dict[str, Strategy] = {}
    for record in sorted((r for file in files for r in file.STRATEGIES), key=lambda r: r.lesson):
        if found.setdefault(record.name, record) is not record:
            raise ValueError(f"two strategies are named {record.name!r}; rename one of them")
    return found


STRATEGIES = _records()
