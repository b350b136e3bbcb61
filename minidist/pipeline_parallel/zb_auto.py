"""A searched zero-bubble schedule: the best order found for given times and memory.

Qi et al., Zero Bubble (Almost) Pipeline Parallelism (ICLR 2024; arXiv 2401.10241), section 3.1; see
timed_order.py for a picture. The paper searches a grid of binary choices: whether the warm-up takes
one more F, whether to skip an F. Here they are a hill to climb: one F more or fewer in the warm-up,
rank by rank, and two choices for all ranks together: whether to skip, and whether W fills all
bubbles, or those only that section 3.1 names. The orders of 1f1b, zb_h1 and zb_h2, or what the
memory permits of them, are candidates, too.
"""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import count, product
from math import lcm
from numbers import Rational, Real

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import KINDS, Action, Programs, looped
from minidist.pipeline_parallel.timed_order import (
    Choice,
    Line,
    Rank,
    is_duration,
    timed_order,
)

ALL_RANKS = [(fill, skip) for fill in ("large", "all") for skip in (False, True)]  # for all ranks
EFFORT = 100_000  # actions placed by each of two climbs: about a quarter of a second


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
    return Programs([list(actions_of(rank.order)) for rank in best], looped(p, 1))


def line_of(p: int, m: int, *times) -> Line:
    """Return what is given, in whole numbers: exact, so that equal orders tie, and fast."""
    *stages, latency = times
    stages = [list(given) if hasattr(given, "__len__") else [given] * p for given in stages]
    for given in stages:
        if len(given) != p:
            raise WrongInput(f"{len(given)} durations for {p} stages; give one number, or {p}")
    stages, latency = [[_exact(t) for t in given] for given in stages], _exact(latency)
    unit = lcm(latency.denominator, *(t.denominator for given in stages for t in given))
    whole = ([int(t * unit) for t in stage] for stage in zip(*stages, strict=True))
    return Line([dict(zip("FIW", t, strict=True)) for t in whole], m, int(latency * unit))


def _exact(t) -> Fraction:
    if not is_duration(t):
        raise WrongInput(f"a duration is a number from 0, not {t!r}")
    if isinstance(t, Rational):
        return Fraction(int(t.numerator), int(t.denominator))
    return Fraction(t) if isinstance(t, Decimal) else Fraction(float(t))


def actions_of(order: list[str]) -> Iterator[Action]:
    """Yield F0 F1 I0 ... of F F I ..."""
    numbers = {sign: count() for sign in "FIW"}
    return (KINDS[sign](next(numbers[sign])) for sign in order)


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
