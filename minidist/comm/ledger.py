"""Ledger: the bytes that a rank has sent."""

from collections import Counter

BY_FORMULA = " (by formula)"


class Ledger:
    """Payload bytes that other ranks take from this one, per operation.

    Control traffic does not count, nor does what a rank gives to itself. Bytes are counted where
    they are handed over. Where a library moves them unseen, as MPI and NCCL do, they are computed
    by their closed form; the name of the row then ends in BY_FORMULA, since it proves nothing about
    bytes.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def as_one(self, name: str) -> Counter[str]:
        """Return the bytes that were counted as one row, and those by formula as another one."""
        rows: Counter[str] = Counter()
        for row, nbytes in self.bytes.items():
            rows[name + BY_FORMULA if row.endswith(BY_FORMULA) else name] += nbytes
        return rows

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"
