"""The bill of a rank: what others have taken from it."""

from collections import Counter


class Ledger:
    """Payload bytes that other ranks take from this one, per operation.

    Control traffic does not count, nor what a rank takes from itself.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"
