"""What `minidist bench` prints: rows, made of rounds, each of them a line.

A round is {contestant: {workload: seconds}}; where a contestant has no times it is the reason in
words. All contestants take turns within a round, so that a slow moment of the machine affects all;
a ratio is the median over rounds of the ratios within a round.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.events import Clock
from minidist.observe.stopwatch import median_seconds

Step = Callable[[], object]
Works = Mapping[str, Callable[[], Step]]  # {workload: what prepares a call}
Times = dict[str, float]
Answer = Times | str
SETTLE = 0.3  # seconds; threads that BLAS starts in each process spin at first
FORM = "{:<39}{:<4}{:>12} {:<14}{:>11}{:>7}{:>7}  {}"
NUMBERS = {"ours_ms": "{:.3f} ms", "peer_ms": "{:.3f} ms", "ratio": "{:.2f}", "limit": "{:.2f}"}


def times_of(
    works: Works,
    meet: Step = lambda: None,
    repeats: int = 5,
    clock: Callable[[], Clock] = Clock,
) -> Times:
    """Return the median seconds of a call of each workload, on one BLAS thread.

    Each is prepared when the one before has gone, with its memory.
    """
    time.sleep(SETTLE)
    with threadpool_limits(1):
        return {
            name: median_seconds(make(), meet, repeats, clock()) for name, make in works.items()
        }


def slowest(ranks: Iterable[Times]) -> Times:
    """Return each workload's longest time over the ranks."""
    first, *others = ranks
    return {name: max([first[name], *(times[name] for times in others)]) for name in first}


class Rounds(list[Mapping[str, Answer]]):
    """What the contestants have answered, round by round."""

    def seconds(self, contestant: str, workload: str) -> np.ndarray:
        """Return a contestant's seconds per round; it has them in all."""
        answers = [one[contestant] for one in self]
        return np.array([answer[workload] for answer in answers if not isinstance(answer, str)])

    def row(
        self,
        name: str,
        workload: str,
        peer: str = "",
        limit: float | None = None,
        theirs: str = "",
        note: str = "",
    ) -> dict:
        """Return our time of a workload beside a peer's.

        limit   the largest ratio of ours over theirs that is allowed
        theirs  the peer's name of the workload, where it has another
        """
        ours = self.seconds("ours", workload)
        row = remark(name, note) | {"ours_ms": 1e3 * middle(ours), "peer": peer, "limit": limit}
        reasons = [answer for one in self if isinstance(answer := one.get(peer), str)]
        if reasons or not peer:
            return row | {"note": "; ".join(filter(None, [note, *reasons[:1]]))}
        others = self.seconds(peer, theirs or workload)
        return row | {"peer_ms": 1e3 * middle(others), "ratio": middle(ours / others)}


def rounds_of(rounds: int, **contestants: Callable[[], Answer]) -> Rounds:
    """Ask all contestants for their times, one after the other, in each round."""
    return Rounds({name: ask() for name, ask in contestants.items()} for _ in range(rounds))


def middle(per_round: np.ndarray) -> float:
    return float(np.median(per_round))


def remark(name: str, note: str) -> dict:
    """Return a row without numbers."""
    row: dict = {"name": name, "processor": "CPU", "ours_ms": None, "peer": "", "peer_ms": None}
    return row | {"ratio": None, "limit": None, "note": note}


def head(title: str) -> str:
    return FORM.format(title, "on", "minidist", "peer", "", "ratio", "limit", "").rstrip()


def line(row: dict) -> str:
    """Return a row for people; what it has not stays empty."""
    cells = ["" if x is None else NUMBERS.get(key, "{}").format(x) for key, x in row.items()]
    return FORM.format(*cells).rstrip()
