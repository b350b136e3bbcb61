r"""What each case of a strategy sends, by operation: run again, and compared with ledgers.txt.

A line has the strategy, the ranks, the case, and the bytes of all ranks together:

    hybrid | 4 | 2 dp x 2 pp, ZeRO 1 | all_gather 7104  all_reduce 128  ...

A change of bytes that is meant is recorded, and read in the diff before it is committed:

    python -m pytest tests --record-ledgers -m "slow or not slow" \
        -k "keeps_its_promise or bytes_that_were_recorded or no_journey_back"
"""

from pathlib import Path

FILE = Path(__file__).with_name("ledgers.txt")


class Ledgers:
    """The recorded bytes; with `record`, what is compared is written into the file instead."""

    def __init__(self, record: bool = False):
        self.record, self.lines = record, {}
        for line in FILE.read_text(encoding="utf-8").splitlines():
            *case, sent = line.split(" | ")
            self.lines[tuple(case)] = {
                operation: int(nbytes)
                for operation, nbytes in (part.rsplit(" ", 1) for part in sent.split("  ") if part)
            }

    def check(self, row: dict) -> None:
        """Fail if a row of `equivalence.check` sends what was not recorded, with the operations."""
        case, sent = (row["strategy"], str(row["ranks"]), row["case"]), row["operations"]
        if self.record:
            self.lines[case] = sent
            return
        assert case in self.lines, f"{case} is not in {FILE.name}; record it as {__file__} says"
        assert sent == self.lines[case], f"{', '.join(case)}: {changes(sent, self.lines[case])}"

    def save(self) -> None:
        if self.record:
            lines = [
                " | ".join([*case, "  ".join(f"{name} {n}" for name, n in sorted(sent.items()))])
                for case, sent in sorted(self.lines.items())
            ]
            FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def changes(sent: dict[str, int], recorded: dict[str, int]) -> str:
    """Say which operations send more or less than was recorded."""
    parts = []
    for operation in sorted(sent | recorded):
        more = sent.get(operation, 0) - recorded.get(operation, 0)
        if more:
            words = f"{abs(more):,} bytes {'more' if more > 0 else 'less'} than the recorded"
            parts.append(f"{operation} sends {words} {recorded.get(operation, 0):,}")
    return "; ".join(parts)
