"""Every strategy as one record, and what its checks need: jobs, cases, closed forms.

A job starts from the weights of a single-device model and takes one batch, on every rank: `job.py`.
`records.toml` and `cases.toml` say what can be said in words and numbers, `record.py` and
`cases.py` read them; every other file here ends in a list STRATEGIES. To add a strategy, add a
table and a record, or a file: all files are read, and records are ordered by their lessons.
"""

from importlib import import_module
from pkgutil import iter_modules

from minidist.errors import WrongInput
from minidist.verify.strategies.cases import INPUT, Case, collect, one_device
from minidist.verify.strategies.record import Strategy

__all__ = ["INPUT", "STRATEGIES", "Case", "Strategy", "collect", "one_device"]


def _records() -> dict[str, Strategy]:
    """Return {name: record} of all files that have a list STRATEGIES."""
    names = sorted(module.name for module in iter_modules(__path__))
    files = [import_module(f"{__name__}.{name}") for name in names]
    records = [record for file in files for record in getattr(file, "STRATEGIES", [])]
    named: dict[str, Strategy] = {}
    for record in sorted(records, key=lambda record: record.lesson):
        if named.setdefault(record.name, record) is not record:
            raise WrongInput(f"two strategies are named {record.name!r}; rename one of them")
    return named


STRATEGIES = _records()
