"""How good the searched orders are: beside the best of all orders, and beside published figures."""

from fractions import Fraction
from itertools import pairwise, permutations, product
from random import Random

import pytest

from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import (
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    looped,
)
from minidist.pipeline_parallel.execution_order import Stuck
from minidist.pipeline_parallel.zb_auto import by_hand, climb, cost, line_of, timed_order, warm_ups
from minidist.planning import simulate
from tests.pipeline_parallel.optimal_order import least_makespan
from tests.pipeline_parallel.searched import TIMES, drawn, programs_of

KINDS = Forward, BackwardInput, BackwardWeight
# What Qi et al. 2024 (arXiv 2401.10241) publish. From table 9, appendix D, profiled: p, m, TF, TB,
# TW, Tcomm; their B is our I. From table 5, section 5.3: the bubble rates of 1F1B, ZB-H1, ZB-H2,
# ZB-1p and ZB-2p, in the longest span of a stage.
PROFILES = {
    (8, 24, 18.522, 18.086, 9.337, 0.601): (0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626): (0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762): (0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527): (0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577): (0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535): (0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377): (0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379): (0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378): (0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408): (0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408): (0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460): (0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
}


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_the_search_alone_is_seldom_worse_than_the_orders_by_hand_and_often_better(count):
    """Without them among its candidates; within memories in which they fit, or are made to fit."""
    random, better, worse = Random(3), 0, 0
    for _ in range(count):
        p, m, times, latency, memory = drawn(random)
        line, memory = line_of(p, m, *times.values(), latency), memory or m + 2 * p
        alone = cost(timed_order(line, climb(line, list(warm_ups(line, memory)))))
        hand = min(cost(timed_order(line, choice)) for choice in by_hand(line, memory))
        better, worse = better + (alone[0] < hand[0]), worse + (alone[0] > hand[0])
    assert better >= 0.15 * count and worse <= 0.04 * count, (better, worse)


def test_the_oracle_of_the_best_order_finds_what_all_orders_of_two_ranks_have():
    """For two micro-batches, in any order, too."""
    pool = [kind(i) for i in range(2) for kind in KINDS]
    orders = [
        order
        for order in permutations(pool)
        if all(
            order.index(a) < order.index(b) for i in (0, 3) for a, b in pairwise(pool[i : i + 3])
        )
    ]
    random = Random(4)
    for memory in (1, 2):
        times, latency = [[random.randint(1, 9) for _ in range(2)] for _ in TIMES], memory - 1
        spans = []
        for pair in product(orders, repeat=2):
            try:
                found = simulate(Programs(pair, looped(2, 1)), *times, latency=latency)
            except Stuck:
                continue
            if max(found.peak_stash) <= memory:
                spans.append(found.makespan)
        stages = list(zip(*times, strict=True))
        assert least_makespan(2, stages, latency, memory, max(spans)) == min(spans)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_on_two_and_three_ranks_it_is_mostly_the_best_order_of_all(count):
    random, gaps = Random(5), []
    while len(gaps) < count:
        p, m, times, latency, memory = drawn(random, 3, lambda p: range(1, 2 * p + 1))
        if p > 1 and m <= 4:
            found = simulate(
                programs("zb_auto", p, m, **times, latency=latency, memory=memory),
                **times,
                latency=latency,
            ).makespan
            stages = [tuple(t.values()) for t in line_of(p, m, *times.values(), 0).stages]
            best = least_makespan(m, stages, latency, memory, found)
            gaps.append(Fraction(found, best) - 1)
    assert min(gaps) == 0  # the oracle knows no order that is worse
    assert sum(gap == 0 for gap in gaps) >= 0.95 * count
    assert sum(gaps) <= 0.005 * count and max(gaps) < 0.25


def rates(p, m, *times):
    """Return the bubble rates of a row of table 5.

    ZB-1p is zb_auto with memory=p. ZB-2p is the heuristic with the paper's choices: W fills the
    large bubbles, no F is skipped. The paper limits memory to 2p and counts less of it from I to W
    than before; the rates are those of table 5 where none is counted from I to W.
    """
    each = dict(zip((*TIMES, "latency"), times, strict=True))
    orders = [programs(name, p, m) for name in ("1f1b", "zb_h1", "zb_h2")]
    orders.append(programs("zb_auto", p, m, memory=p, **each))
    line = line_of(p, m, *times)
    heuristic = ("large", False, 2 * m)
    choice = next(c for c in warm_ups(line, 2 * m) if (c.fill, c.skip, c.limit) == heuristic)
    ranks = timed_order(line, choice._replace(ahead=tuple(min(n, 2 * p) for n in choice.ahead)))
    spans = [simulate(order, **each).span for order in [*orders, programs_of(ranks)]]
    return [1 - m * sum(times[:3]) / span for span in spans]


@pytest.mark.parametrize("most", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_bubble_rates_are_those_that_the_paper_publishes(most):
    for (p, m, *times), published in PROFILES.items():
        if m <= most:
            found = [round(rate, 4) for rate in rates(p, m, *times)]
            assert found == list(published), (p, m)
