"""A searched zero-bubble schedule: the best order found for given times and memory.

Qi et al., Zero Bubble (Almost) Pipeline Parallelism (ICLR 2024; arXiv 2401.10241), section 3.1. An
order of F, I and W is made on clocks: what is next on a rank depends on when messages arrive. TF =
TI = TW = latency = 1, p = 3, m = 4, at most 4 micro-batches in flight; 1F1B takes 26 units, zb_h1
22, this order 17:

    rank 0   F0 F1 F2 F3                I0 W0 I1 W1 I2 W2 I3 W3
    rank 1         F0 F1 F2       I0 F3 I1    I2 W0 I3 W1 W2 W3
    rank 2               F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

First `ahead` forwards on each rank. Then turns: the next I of every rank, from the last rank to the
first, so that it is known when each gradient arrives; then the next F of every rank, from the first
to the last. W fills bubbles, and makes room where the limit is reached. At the end, all W left.

The paper searches a grid of binary choices: whether the warm-up takes one more F, whether to skip
an F. Here they are a hill to climb: one F more or fewer in the warm-up, rank by rank, and two
choices for all ranks together: whether to skip, and whether W fills all bubbles, or those only that
section 3.1 names. The orders of 1f1b, zb_h1 and zb_h2, or what the memory permits of them, are
candidates, too.
"""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import product
from math import inf, lcm
from numbers import Rational, Real
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import Programs, looped
from minidist.pipeline_parallel.zero_bubble import actions_of

ALL_RANKS = [(fill, skip) for fill in ("large", "all") for skip in (False, True)]  # for all ranks
EFFORT = 100_000  # actions placed by each of two climbs: about a quarter of a second


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


def zb_auto(
    p: int, m: int, forward=1, backward_input=1, backward_weight=1, latency=0, memory=None
) -> Programs:
    """Return the best order found for these times.

    forward, backward_input, backward_weight
               TF, TI, TW of a stage: a number, or a list of one per stage
    latency    time of a transfer to another rank
    memory     the most micro-batches in flight on a rank, from the start of F to the end of W;
               None: no limit

    Its makespan is at most those of 1f1b and zb_h1 if memory >= p, of zb_h2 if memory >= 2p - 1.
    """
    if memory is not None and not (isinstance(memory, Real) and float(memory) >= 1):
        raise WrongInput(f"no order has {memory!r} micro-batches in flight; give memory=1 or more")
    line = line_of(p, m, forward, backward_input, backward_weight, latency)
    memory = m + 2 * p if memory is None else int(min(float(memory), m + 2 * p))
    tops = climb(line, list(by_hand(line, memory))), climb(line, list(warm_ups(line, memory)))
    best = min((timed_order(line, top) for top in tops), key=cost)
    return Programs([actions_of(rank.order) for rank in best], looped(p, 1))


def line_of(p: int, m: int, *times) -> Line:
    """Scale the given times to whole numbers: exact, so that equal orders tie, and fast."""
    *stages, latency = times
    stages = [
        list(durations) if hasattr(durations, "__len__") else [durations] * p
        for durations in stages
    ]
    for durations in stages:
        if len(durations) != p:
            raise WrongInput(f"{len(durations)} durations for {p} stages; give one number, or {p}")
    stages, latency = [[_exact(t) for t in durations] for durations in stages], _exact(latency)
    unit = lcm(latency.denominator, *(t.denominator for durations in stages for t in durations))
    whole = ([int(t * unit) for t in stage] for stage in zip(*stages, strict=True))
    return Line([dict(zip("FIW", t, strict=True)) for t in whole], m, int(latency * unit))


def _exact(t) -> Fraction:
    if not is_duration(t):
        raise WrongInput(f"a duration is a number from 0, not {t!r}")
    if isinstance(t, Rational):
        return Fraction(int(t.numerator), int(t.denominator))
    return Fraction(t) if isinstance(t, Decimal) else Fraction(float(t))


def by_hand(line: Line, memory: int) -> Iterator[Choice]:
    """Yield 1f1b in halves, zb_h1 and zb_h2; less ahead, and less deferred, if memory is short."""
    p = len(line.stages)
    for reach, delay in ((1, 0), (1, 1), (2, 2)):
        ahead = [min(memory, reach * (p - 1 - r) + 1) for r in range(p)]
        late = [min(memory - n, delay * r) for r, n in enumerate(ahead)]
        yield Choice(tuple(min(n, line.m) for n in ahead), tuple(late), memory)


def warm_ups(line: Line, memory: int) -> Iterator[Choice]:
    """Yield orders that begin with as many F as end before the first gradient is back.

    That is at least one more than on the next rank. Where it exceeds a limit, a rank gets a share
    in proportion to the time from the start of its F to the end of its I. (Little's law:
    micro-batches in flight = this time / time per micro-batch.) Small limits come first, and win if
    more memory makes nothing faster.
    """
    p, m = len(line.stages), line.m
    trip: float = -2 * line.latency
    trips: list[float] = []
    for times in reversed(line.stages):
        trip += times["F"] + times["I"] + 2 * line.latency
        trips.insert(0, trip)
    slowest, fit = 0, []
    for times, trip in zip(line.stages, trips, strict=True):
        slowest = max(slowest, times["F"])  # the time between two F that arrive
        fit.append(1 + (trip - times["F"] - times["I"]) // slowest if slowest else m)
    for limit in sorted({min(memory, n) for n in (p, 2 * p - 1, 2 * p, memory)}):
        ahead = [0] * (p + 1)
        for r in reversed(range(p)):
            share = -(-limit * trips[r] // (trips[0] or 1))  # rounded up
            ahead[r] = int(max(1, ahead[r + 1], min(m, share, max(fit[r], ahead[r + 1] + 1))))
        for fill, skip in ALL_RANKS:
            yield Choice(tuple(ahead[:p]), (m,) * p, limit, fill, skip)


def climb(line: Line, choices: list[Choice]) -> Choice:
    """Return the best of these, or rather of its neighbours, or of theirs, while that helps."""
    costs: dict[Choice, tuple] = {}

    def cost_of(choice):
        if choice not in costs:
            costs[choice] = cost(timed_order(line, choice))
        return costs[choice]

    most = EFFORT // (3 * len(line.stages) * line.m)
    better: Choice | None = min(choices, key=cost_of)
    best = choices[0]
    while better is not None:
        best = better
        affordable = (near for near in neighbours(best, line.m) if len(costs) < most)
        better = next((near for near in affordable if cost_of(near) < cost_of(best)), None)
    return best


def neighbours(choice: Choice, m: int) -> Iterator[Choice]:
    """Yield other choices for all ranks; then one F more or fewer on a rank, or on all up to it."""
    for fill, skip in ALL_RANKS:
        yield choice._replace(fill=fill, skip=skip)
    p = len(choice.ahead)
    for r, step, up_to in product(range(p), (1, -1), (True, False)):
        ahead = [n + step if k == r or (up_to and k < r) else n for k, n in enumerate(choice.ahead)]
        after = 1
        for k in reversed(range(p)):
            after = ahead[k] = min(m, choice.limit, max(after, ahead[k]))
        yield choice._replace(ahead=tuple(ahead))


def cost(ranks: list[Rank]) -> tuple:
    """Return (makespan, longest span of a rank, most micro-batches in flight): less is better."""
    spans = [rank.clock - rank.begin for rank in ranks]
    return max(rank.clock for rank in ranks), max(spans), max(rank.peak for rank in ranks)
