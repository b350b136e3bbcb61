"""Lesson 4's exercises: checks, worked solutions, hints, tempting wrong answers."""

from itertools import product

import numpy as np


def check_1(attempt):
    for bound, *clocks in product(range(3), range(5), range(5), range(5)):
        for clock in clocks:
            found = attempt(clock, list(clocks), bound)
            if not isinstance(found, bool | np.bool_):
                return f"may_begin({clock}, {clocks}, {bound}) is {found!r:.60}, not True or False"
            if found != all(other >= clock - bound for other in clocks):
                return f"may_begin({clock}, {clocks}, {bound}) is {found}"


def solution_1(clock, clocks, bound):
    return clock - min(clocks) <= bound


hints_1 = (
    "How many clocks is the worker ahead? Of which other worker does the rule speak?",
    "The slowest worker decides: it has done min(clocks) minibatches.",
    "True if clock - min(clocks) is at most the bound.",
)


def the_fastest_decides(clock, clocks, bound):
    return clock - max(clocks) <= bound


def fewer_than_the_bound(clock, clocks, bound):
    return clock - min(clocks) < bound


tempting_1 = [the_fastest_decides, fewer_than_the_bound]


def check_2(attempt):
    """Gradient i is [10^i, 2 10^i], so that a sum shows what is in it."""
    for in_time in product((True, False), repeat=4):
        found = attempt([np.array([1.0, 2.0]) * 10.0**i for i in range(4)], list(in_time))
        if not isinstance(found, list | tuple) or not all(np.shape(x) == (2,) for x in found):
            return f"the result is {found!r:.60}, not a list of arrays of two elements"
        ends = [i + 1 for i in range(4) if in_time[i] or i == 3]
        starts = [0, *ends[:-1]]
        want = [sum(10**i for i in range(*part)) for part in zip(starts, ends, strict=True)]
        sums = [int(x[0]) for x in found]
        if sums != want or any(x[1] != 2 * x[0] for x in found):
            return f"in_time = {list(in_time)}, gradients 1, 10, 100, 1000: sent {sums}, not {want}"


def solution_2(gradients, in_time):
    sent, buffer = [], 0
    for gradient, taken in zip(gradients, in_time, strict=True):
        buffer = buffer + gradient
        if taken:
            sent.append(buffer)
            buffer = 0
    return sent if in_time[-1] else [*sent, buffer]


hints_2 = (
    "After a gradient that is declined, the worker has two gradients to offer. What does it send?",
    "Keep a sum. It grows with every gradient, and begins again at 0 when it has been sent.",
    "At the end, send the sum once more if the last offer was declined.",
)


def forgets_the_late(gradients, in_time):
    return [g for g, taken in zip(gradients, in_time, strict=True) if taken]


def forgets_the_rest(gradients, in_time):
    sent, buffer = [], 0
    for gradient, taken in zip(gradients, in_time, strict=True):
        buffer = buffer + gradient
        if taken:
            sent.append(buffer)
            buffer = 0
    return sent


def never_empties(gradients, in_time):
    sums = np.cumsum(gradients, axis=0)
    last = len(sums) - 1
    return [total for i, total in enumerate(sums) if in_time[i] or i == last]


tempting_2 = [forgets_the_late, forgets_the_rest, never_empties]

RATE, HALF = 0.1, 3


def gradient_of(batch, w):
    """Return a gradient of which each half depends on both halves of w."""
    return np.random.default_rng(batch).standard_normal((2 * HALF, 2 * HALF)) @ w


def torn_run():
    """Return what the server of exercise 3 has at the end, and its log: the versions read."""
    w, late, log = np.ones(2 * HALF), 0.0, []
    pulled = dict.fromkeys(range(3), (w.copy(), 0))
    for batch, worker in enumerate(np.random.default_rng(0).integers(3, size=20).tolist()):
        weights, version = pulled[worker]
        step = RATE * gradient_of(batch, weights)
        w[HALF:] -= late
        w[:HALF] -= step[:HALF]
        late = step[HALF:]
        log.append(version)
        pulled[worker] = w.copy(), len(log)
    w[HALF:] -= late
    return w, log


def check_3(attempt):
    torn, log = torn_run()
    halves = [np.ones(HALF)], [np.ones(HALF)]  # of each, its versions
    for batch, v in enumerate(log):
        read = attempt(v)
        if np.shape(read) != (2,) or not all(isinstance(n, int | np.integer) for n in read):
            return f"versions_read({v}) is {read!r:.60}, not two whole numbers"
        if not all(0 <= n <= v for n in read):
            return f"versions_read({v}) is {read!r:.60}, but then there were versions 0 to {v} only"
        w = np.concatenate([versions[n] for versions, n in zip(halves, read, strict=True)])
        steps = np.split(RATE * gradient_of(batch, w), 2)
        for versions, step in zip(halves, steps, strict=True):
            versions.append(versions[-1] - step)
    replayed = np.concatenate([versions[-1] for versions in halves])
    if not np.array_equal(replayed, torn):
        return f"with these versions the replay is off by up to {abs(replayed - torn).max():.2g}"


def solution_3(v):
    return v, max(v - 1, 0)


hints_3 = (
    "When the server answers a pull after v pushes: how many updates are in each half?",
    "The second half waits for the next push. Before the first push nothing waits.",
    "The first half has all v updates, the second one less, but never less than 0.",
)


def both_are_new(v):
    return v, v


def below_zero(v):
    return v, v - 1


def halves_swapped(v):
    return max(v - 1, 0), v


tempting_3 = [both_are_new, below_zero, halves_swapped]
