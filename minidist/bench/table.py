"""The rows of `minidist bench step` as the table of README.md.

    minidist bench step --rounds 9 --json > rows.json
    python -m minidist.bench.table < rows.json

A dash: not measured.
"""

import json
import sys
from itertools import groupby

PEERS = "PyTorch", "torch.compile", "JAX"
HEAD = "workload", "step", "products alone", "share", *PEERS, "peak"


def table(rows: list[dict]) -> str:
    """Return Markdown: a line per workload; beside a peer's time ours over it."""
    (machine, *_), *works = [list(own) for _, own in groupby(rows, key=lambda row: row["name"])]
    cells = [HEAD, ("---",) * len(HEAD), *map(_cells, works)]
    lines = [f"| {' | '.join(words)} |" for words in cells]
    return "\n".join([f"Measured on {machine['note']}:", "", *lines])


def _cells(rows: list[dict]) -> tuple[str, ...]:
    """Return the cells of a workload; a dash where there is no number."""
    by_peer = {row["peer"]: row for row in rows}
    share = peak = alone = "-"
    if products := by_peer.get("products"):
        alone = _ms(products["peer_ms"])
        share, peak = (words.split(" ", 1)[1] for words in products["note"].split(", "))
    step = rows[0]["name"], _ms(rows[0]["ours_ms"])
    return *step, alone, share, *(_peer(by_peer.get(name)) for name in PEERS), peak


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"


def _peer(row: dict | None) -> str:
    if row is None or row["ratio"] is None:
        return "-"
    return f"{_ms(row['peer_ms'])}, {row['ratio']:.2f}"


if __name__ == "__main__":
    print(table(json.load(sys.stdin)))
