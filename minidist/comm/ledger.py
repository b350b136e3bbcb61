"""Ledger: the bytes that a rank has sent."""

from collections import Counter


class Ledger:
    """Payload bytes that other ranks take from this one, per operation.

    Control traffic does not count, nor does what a rank gives to itself.

    billed  operations whose bytes a library moves unseen. They are not counted where they are
            handed over, but billed by their closed form: such a row proves nothing about bytes.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()
        self.billed: set[str] = set()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"
