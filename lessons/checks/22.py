"""Lesson 22's exercises: checks, worked solutions, hints, tempting wrong answers."""

from math import expm1, sqrt

import numpy as np

RATE = np.random.default_rng(1).exponential(size=100_000)  # lives, in units of their mean


def is_seconds(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and 0 < found < 1e300


def cost(tau, delta, M):
    with np.errstate(over="ignore"):
        return M / tau * np.expm1((tau + delta) / M)


def best(delta, M):
    tau = M * np.geomspace(1e-5, 10, 20_001)
    return tau[np.argmin(cost(tau, delta, M))]


def check_1(attempt):
    """Compare with the mean of many lives."""
    for tau, delta, M in [(60, 5, 2000), (60, 5, 60), (10, 1, 2)]:
        mean, found = np.mean(M * RATE % (tau + delta)), attempt(tau, delta, M)
        what = f"tau = {tau}, delta = {delta}, M = {M}"
        if not is_seconds(found):
            return f"{what}: {found!r:.60} is no number of seconds"
        if abs(found / mean - 1) > 0.02:
            return f"{what}: in many lives {mean:.2f} s are lost on average, not {found:.2f}"


def solution_1(tau, delta, M):
    return M - (tau + delta) / (np.exp((tau + delta) / M) - 1)


hints_1 = (
    "M seconds pass between two failures. Some of them are intervals that were finished.",
    "How many intervals does a life finish on average? The fold above (cost) has the sum.",
    "lost = M - (tau + delta) times 1 / (exp((tau + delta)/M) - 1).",
)


def half(tau, delta, M):
    return (tau + delta) / 2


def at_most_a_life(tau, delta, M):
    return min((tau + delta) / 2, M)


tempting_1 = [half, at_most_a_life]


def useful(tau, copy, write, M):
    """Return the useful share of many lives, if a second thread writes."""
    lives = M * RATE[:20_000]
    between = max(tau, write) + copy  # a save waits until the one before is whole
    saves = np.maximum(0, (lives - tau - copy - write) // between + 1)  # whole ones
    return tau * saves.sum() / lives.sum()


def check_2(attempt):
    for given in [(1, 300, 11160), (5, 30, 1000), (0.1, 600, 3000), (20, 30, 4000)]:
        most = max(useful(tau, *given) for tau in given[1] * np.geomspace(0.1, 10, 120))
        tau, what = attempt(*given), f"(copy, write, M) = {given}"
        if not is_seconds(tau):
            return f"{what}: {tau!r:.60} is no number of seconds"
        if (share := useful(tau, *given)) < 0.99 * most:
            return f"{what}, tau = {tau:.0f}: {share:.1%} useful; {most:.1%} is possible"


def solution_2(copy, write, M):
    return max(np.sqrt(2 * copy * M), write)


hints_2 = (
    "What does a save cost in every interval? And what only in the interval of a failure?",
    "Waiting costs copy / tau. The writing is lost when a failure hits it, whatever tau is.",
    "So Young's formula has the copy alone; but a save cannot begin before the last is whole.",
)


def copies_alone(copy, write, M):
    return sqrt(2 * copy * M)


def as_before(copy, write, M):
    return sqrt(2 * (copy + write) * M)


tempting_2 = [copies_alone, as_before]


def check_3(attempt):
    alone, delta = 16384 * 54 * 24 / 419, 1 / 12  # hours: Llama 3's ranks, saves of 5 minutes
    for N in (1, 1024, 16384, 262144):
        M, tau = alone / N, attempt(N, alone, delta)
        if not is_seconds(tau):
            return f"{N} ranks: {tau!r:.60} is no number of hours"
        ratio = cost(tau, delta, M) / cost(best(delta, M), delta, M)
        if not ratio < 1.01:
            return f"{N} ranks: tau = {tau:.3g} hours costs {ratio - 1:.1%} more than the least"


def solution_3(N, alone, delta):
    M = alone / N
    tau = M * np.geomspace(1e-5, 10, 20_001)
    return tau[np.argmin(np.expm1((tau + delta) / M) / tau)]


hints_3 = (
    "If one rank fails once in `alone` seconds, how often does one of N ranks fail?",
    "For 262,144 ranks a save is not short beside M. Is Young's formula still good there?",
    "Search for the least (cost) with M = alone / N, or use Daly's series.",
)


def for_one_rank(N, alone, delta):
    return sqrt(2 * delta * alone)


def for_all_ranks(N, alone, delta):
    return sqrt(2 * delta * alone / N)


def until_a_failure(N, alone, delta):
    return alone / N * expm1(1) / 2


tempting_3 = [for_one_rank, for_all_ranks, until_a_failure]
