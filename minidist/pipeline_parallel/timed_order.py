"""An order of F, I and W made on clocks: what is next on a rank depends on when messages arrive.

Qi et al., Zero Bubble (Almost) Pipeline Parallelism (ICLR 2024; arXiv 2401.10241), section 3.1: the
heuristic, for given choices. zb_auto.py searches the choices. TF = TI = TW = latency = 1, p = 3,
m = 4, at most 4 micro-batches in flight; 1F1B takes 26 units, zb_h1 22, this order 17:

    rank 0   F0 F1 F2 F3                I0 W0 I1 W1 I2 W2 I3 W3
    rank 1         F0 F1 F2       I0 F3 I1    I2 W0 I3 W1 W2 W3
    rank 2               F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

First `ahead` forwards on each rank. Then turns: the next I of every rank, from the last rank to the
first, so that it is known when each gradient arrives; then the next F of every rank, from the first
to the last. W fills bubbles, and makes room where the limit is reached. At the end, all W left.
"""

from decimal import Decimal
from math import inf
from numbers import Real
from typing import NamedTuple


def is_duration(value: object) -> bool:
    """Return whether it is a finite number from 0: whole, a float, a Fraction or a Decimal."""
    return isinstance(value, Real | Decimal) and 0 <= float(value) < inf


class Line(NamedTuple):
    """What is given.

    stages   per stage, its times: {"F": TF, "I": TI, "W": TW}
    m        micro-batches
    latency  time of a transfer to the next rank
    """

    stages: list[dict]
    m: int
    latency: float


class Choice(NamedTuple):
    """What is chosen.

    ahead  per rank, its F before its first I; not fewer than on the next rank
    late   per rank, the most W that are deferred
    limit  the most micro-batches in flight, from the start of F to the end of W
    fill   which bubbles W fills: "none"; "large" ones, see `_fill`; "all"
    skip   whether a rank that is two or more F ahead of the next one does not do the next F if it
           has W left to do
    """

    ahead: tuple[int, ...]
    late: tuple[int, ...]
    limit: int
    fill: str = "none"
    skip: bool = False


class Rank:
    """The order of a rank so far, the end of each action, the clock, and the sum of bubbles."""

    def __init__(self, times: dict):
        self.times = times
        self.order: list[str] = []
        self.ends: dict[str, list] = {"F": [], "I": [], "W": []}
        self.begin: float = 0
        self.clock: float = 0
        self.idle: float = 0
        self.peak = 0

    def do(self, sign: str, arrival=0) -> None:
        """Do the next F, I or W, not before what it needs has arrived."""
        start = max(self.clock, arrival)
        if self.order:
            self.idle += start - self.clock
        else:
            self.begin = start
        self.clock = start + self.times[sign]
        self.order.append(sign)
        self.ends[sign].append(self.clock)
        self.peak = max(self.peak, self.in_flight())

    def in_flight(self) -> int:
        return len(self.ends["F"]) - len(self.ends["W"])

    def deferred(self) -> int:
        return len(self.ends["I"]) - len(self.ends["W"])


def timed_order(line: Line, choice: Choice) -> list[Rank]:
    """Return the ranks when all is done; `order` has signs, F, I and W each count from 0."""
    ranks = [Rank(times) for times in line.stages]
    for r, ahead in enumerate(choice.ahead):
        for _ in range(ahead):
            _forward(line, choice, ranks, r)
    for _ in range(line.m):
        arrival: float = 0
        for rank, late in zip(reversed(ranks), reversed(choice.late), strict=True):
            _fill(choice, ranks, rank, arrival)
            rank.do("I", arrival)
            arrival = rank.clock + line.latency
            while rank.deferred() > late:
                rank.do("W")
        for r, rank in enumerate(ranks):
            if len(rank.ends["F"]) < line.m and not (choice.skip and _may_skip(ranks, r)):
                _forward(line, choice, ranks, r)
    for rank in ranks:
        while rank.deferred():
            rank.do("W")
    return ranks


def _forward(line: Line, choice: Choice, ranks: list[Rank], r: int) -> None:
    """Do the next F of rank r; before it, make room."""
    rank = ranks[r]
    arrival = ranks[r - 1].ends["F"][len(rank.ends["F"])] + line.latency if r else 0
    while rank.in_flight() >= choice.limit:
        rank.do("W")
    _fill(choice, ranks, rank, arrival)
    rank.do("F", arrival)


def _fill(choice: Choice, ranks: list[Rank], rank: Rank, arrival) -> None:
    """Do W until this arrival.

    A bubble is large if W fits in, or if it would make the longest sum of bubbles longer.
    """
    while choice.fill != "none" and rank.deferred() and rank.clock < arrival:
        bubble = arrival - rank.clock
        longest = max(other.idle for other in ranks)
        if choice.fill == "large" and bubble < rank.times["W"] and rank.idle + bubble <= longest:
            break
        rank.do("W")


def _may_skip(ranks: list[Rank], r: int) -> bool:
    """Return whether rank r has W to do, and is ahead of the next one without another F, too."""
    if r + 1 == len(ranks) or not ranks[r].deferred():
        return False
    return len(ranks[r].ends["F"]) > len(ranks[r + 1].ends["F"]) + 1
