"""Lesson 21's exercises: checks, worked solutions, hints, tempting wrong answers."""

from math import sqrt
from time import perf_counter, sleep

import numpy as np

from minidist import Cluster


def number(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and abs(found) < 1e300


def step(N, B, S, fixed, each, alpha, beta):
    return fixed + each * B / N + 2 * (N - 1) * (alpha + beta * S / N)


def check_1(attempt):
    for given in (
        (384, 48_000, 0.01, 3e-4, 2e-3, 1.7e-7),
        (384, 48_000, 0.01, 3e-4, 2e-5, 1.7e-7),
        (64, 1_000_000, 0.01, 3e-4, 2e-3, 1.7e-7),  # the bytes alone take longer than the work
        (100, 400, 0.0, 1.0, 1e-3, 1e-9),
        (10, 1_000, 1e-3, 1.23e-2, 3e-2, 1e-7),
    ):
        found, seconds = attempt(*given), {N: step(N, *given) for N in range(1, given[0] + 1)}
        what = "(B, S, fixed, each, alpha, beta) = " + str(given)
        if not number(found) or found not in seconds:
            return f"{what}: {found!r:.60} is no whole number of ranks from 1 to {given[0]}"
        best = min(seconds, key=seconds.get)
        if seconds[found] > seconds[best] * (1 + 1e-9):
            return f"{what}: {found} ranks take {seconds[found]:.4g} s, {best} {seconds[best]:.4g}"


def solution_1(B, S, fixed, each, alpha, beta):
    def seconds(N):
        return fixed + each * B / N + 2 * (N - 1) * (alpha + beta * S / N)

    return min(range(1, B + 1), key=seconds)


hints_1 = (
    "The table has the four counts: write the seconds of a step as a function of N.",
    "No formula is needed: try every N from 1 to B, and keep the best.",
    "With a formula: one term falls like (each B - 2 beta S)/N, one rises like 2 alpha N.",
)


def all_of_them(B, S, fixed, each, alpha, beta):
    return B


def bytes_forgotten(B, S, fixed, each, alpha, beta):
    return max(1, round(sqrt(each * B / (2 * alpha))))


tempting_1 = [all_of_them, bytes_forgotten]


def rank_of_2(group, attempt):
    """Return the first wrong thing that a rank sees in five tries, or None."""
    seconds, x = [], np.arange(4.0) + group.rank
    for _ in range(5):
        worked = []

        def work(worked=worked):
            worked.append(sleep(0.06 * (group.rank == 1)))  # rank 1 has more to do

        group.barrier()
        found = attempt(group, work, x.copy())
        if not isinstance(found, tuple | list) or len(found) != 2 or not number(found[1]):
            return f"the result is {found!r:.60}, not (sum, seconds)"
        if np.shape(found[0]) != (4,) or not np.allclose(found[0], 2 * np.arange(4.0) + 1):
            return f"the sum on rank {group.rank} is {found[0]!r:.60}"
        if len(worked) != 1:
            return f"work() was called {len(worked)} times on rank {group.rank}"
        seconds.append(found[1])
    if not 0 < np.median(seconds) < 0.03:
        said = f"rank {group.rank} says {1e3 * np.median(seconds):.1f} ms"
        return f"{said}; rank 1 works 60 ms longer, and the sum of four numbers is quick"


def check_2(attempt):
    with Cluster(2, "thread") as ranks:
        return next(filter(None, ranks.run(rank_of_2, attempt)), None)


def solution_2(group, work, x):
    work()
    group.barrier()
    start = perf_counter()
    total = group.all_reduce(x)
    return total, perf_counter() - start


hints_2 = (
    "Rank 0 has done its work. What does its all_reduce need before it can return?",
    "Nobody may start a clock before all ranks have arrived.",
    "group.barrier() returns when all ranks have called it. Call it after work().",
)


def as_profiled(group, work, x):
    work()
    start = perf_counter()
    return group.all_reduce(x), perf_counter() - start


def starts_before_the_barrier(group, work, x):
    work()
    start = perf_counter()
    group.barrier()
    return group.all_reduce(x), perf_counter() - start


def barrier_before_the_work(group, work, x):
    group.barrier()
    work()
    start = perf_counter()
    return group.all_reduce(x), perf_counter() - start


tempting_2 = [as_profiled, starts_before_the_barrier, barrier_before_the_work]


def check_3(attempt):
    for N, rest, each, crit in [(1, 2e-3, 3e-5, 24), (16, 2e-3, 3e-5, 24), (1024, 0.1, 1e-3, 1e6)]:
        grid = np.geomspace(1e-3, 1e9, 100_001)
        training = (1 + crit / grid) * (rest + each * grid / N)
        best, found = grid[np.argmin(training)], attempt(N, rest, each, crit)
        what = f"(N, rest, each, B_crit) = {(N, rest, each, crit)}"
        if not number(found) or not found > 0:
            return f"{what}: {found!r:.60} is no batch"
        if (1 + crit / found) * (rest + each * found / N) > 1.0005 * training.min():
            return f"{what}: with {best:.1f} images training ends first, not with {found:.1f}"


def solution_3(N, rest, each, B_crit):
    return (N * rest * B_crit / each) ** 0.5


hints_3 = (
    "Multiply steps and seconds. Which of the four products depend on B?",
    "One falls like rest B_crit / B, one rises like each B / N.",
    "A sum of a falling and a rising term is least where the two are equal.",
)


def always_critical(N, rest, each, B_crit):
    return B_crit


def grows_with_the_ranks(N, rest, each, B_crit):
    return N * sqrt(rest * B_crit / each)


tempting_3 = [always_critical, grows_with_the_ranks]
