"""Lesson 20's exercises: checks, worked solutions, hints, tempting wrong answers."""

from functools import cache

import numpy as np

from minidist import Cluster, nn
from minidist.observe import costs
from minidist.verify.strategies import Case


def sent(name, model, examples):
    case = Case("crossing", model, *np.zeros((2, examples, model.context), int))
    with Cluster(4, "thread") as ranks:
        return sum(cost.sent for cost in costs.measure_costs(name, case, ranks))


def check_1(attempt):
    """Compare with the bytes that four ranks send for 4 and for 8 examples."""
    for blocks, width, length in ((6, 32, 16), (2, 192, 8)):
        model = nn.Transformer(64, width, 8, blocks, length, dtype="float64")
        naive, four = sent("naive", model, 4), sent("sequence", model, 4)
        want = 4 + (naive - four) / ((sent("sequence", model, 8) - four) / 4)
        given = sum(p.size for p in model.parameters()), blocks, width, length
        found = attempt(*given)
        if not isinstance(found, int | float | np.number):
            return f"the result is {found!r:.60}, not a number"
        if not abs(found / want - 1) < 0.06:
            return f"(P, L, C, T) = {given}: {want:.2f} examples, not {found:.2f}"


def solution_1(P, L, C, T):
    return 2 * P / ((10 * L + 5) * C * T)


hints_1 = (
    "Write both rows of numbers from the table, and let them be equal. What drops out?",
    "2 (N - 1) P = (N - 1) (10 L + 5) B T C. Solve it for B.",
    "Both count what all ranks send, so the 2 of the all_reduce stays.",
)


def one_way(P, L, C, T):
    return P / ((10 * L + 5) * C * T)


def as_if_nothing_is_gathered_again(P, L, C, T):
    return 2 * P / ((8 * L + 4) * C * T)


def blocks_alone(P, L, C, T):
    return 2 * P / (8 * L * C * T)


tempting_1 = [one_way, as_if_nothing_is_gathered_again, blocks_alone, lambda P, L, C, T: None]


@cache
def held(name, N):
    with Cluster(N, "thread") as ranks:
        return [cost.memory for cost in costs.measure_costs(name, costs.example(name), ranks)]


@cache
def alone(name):
    return costs.alone(costs.example(name)).memory


def check_2(attempt):
    for name in ("zero_3", "1f1b", "gpipe", "sequence", "attention"):
        most = {N: max(held(name, N)) for N in (1, 2, 4, 8)}
        for memory in alone(name) * np.array([1.1, 0.6, 0.27, 0.25, 0.18, 0.14]):
            want = next((N for N in most if most[N] <= memory), None)
            found = attempt(name, float(memory))
            if type(found) is not type(want) and not isinstance(found, int | np.integer | None):
                return f"{name}: {found!r:.60} is neither a number of ranks nor None"
            if found != want:
                words = f"{name} in {memory / 1e3:.0f} kB: N = {want}, not {found}"
                held_then = f"{most[found] / 1e3:.0f} kB" if found in most else "nothing"
                return f"{words}, with which the fullest rank holds {held_then}"


def solution_2(name, memory):
    return next((N for N in (1, 2, 4, 8) if max(held(name, N)) <= memory), None)


hints_2 = (
    "While a layer computes, it is whole, and the next one's weights are on their way.",
    "Take the cost of every rank: a pipeline's first rank is not its fullest.",
    "next((N for N in (1, 2, 4, 8) if ... <= memory), None), with the largest .memory.",
)


def by_division(name, memory):
    return next((N for N in (1, 2, 4, 8) if alone(name) / N <= memory), None)


def first_rank(name, memory):
    return next((N for N in (1, 2, 4, 8) if held(name, N)[0] <= memory), None)


def mean_of_ranks(name, memory):
    return next((N for N in (1, 2, 4, 8) if np.mean(held(name, N)) <= memory), None)


tempting_2 = [by_division, first_rank, mean_of_ranks, lambda name, memory: None]


def check_3(attempt):
    answers = ([1, 1, 1, 1], 2, 2), ([1, 2, 3, 6], 2, 7.5), ([5, 1], 4, 5), ([2, 3, 7], 1, 12)
    for works, cores, want in answers:
        found = attempt(list(works), cores)
        if not isinstance(found, int | float | np.number):
            return f"the result is {found!r:.60}, not a number"
        if not abs(found - want) < 1e-9:
            return f"works {works} on {cores} cores: {want:g} s, not {found:g}"


def solution_3(works, cores):
    seconds, done, left = 0.0, 0.0, sorted(works)
    for i, work in enumerate(left):
        seconds += (work - done) / min(1, cores / (len(left) - i))
        done = work
    return seconds


hints_3 = (
    "Sort the works. Until the least of them is done, all ranks go on equally fast.",
    "While k ranks are at work, a second of work takes max(1, k / cores) seconds.",
    "Add (work - the one before) times max(1, k / cores), for k = N, N - 1, ..., 1.",
)


def total_over_cores(works, cores):
    return sum(works) / cores


def longest_slowed(works, cores):
    return max(works) * max(1, len(works) / cores)


def longest_or_total(works, cores):
    return max(max(works), sum(works) / cores)


tempting_3 = [total_over_cores, longest_slowed, longest_or_total, lambda works, cores: None]
