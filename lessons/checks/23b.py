"""Lesson 23b's exercises: checks, worked solutions, hints, tempting wrong answers."""

from math import comb, exp

import numpy as np

from minidist.planning import pipedream


def is_number(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and abs(found) < 1e300


def check_1(attempt):
    random = np.random.default_rng(3)
    for _ in range(20):
        seconds, parameters = random.integers(1, 20, (2, 4)).tolist()
        layers = [(t, 0, w) for t, w in zip(seconds, parameters, strict=True)]
        best = float(pipedream(layers, 2, 4)[1])
        found = attempt(list(seconds), list(parameters), 4)
        what = f"seconds {seconds}, parameters {parameters}, bandwidth 4"
        if not is_number(found):
            return f"{what}: {found!r:.60} is no number of seconds"
        if not abs(found - best) < 1e-9:
            return f"{what}: {best:g} s per minibatch are possible, not {found:g}"


def solution_1(seconds, parameters, bandwidth):
    pipelines = [max(sum(seconds[:i]), sum(seconds[i:])) for i in range(1, len(seconds))]
    return min(*pipelines, max(sum(seconds), 2 * sum(parameters) / bandwidth) / 2)


hints_1 = (
    "Two stages: the slower one counts. Where can the cut be?",
    "Two replicas: the first line of the box with 2 for the replicas.",
    "min over the cuts of max(before, after), and max(all, 2 x bytes / bandwidth) / 2.",
)


def two_stages(seconds, parameters, bandwidth):
    return min(max(sum(seconds[:i]), sum(seconds[i:])) for i in range(1, len(seconds)))


def two_replicas(seconds, parameters, bandwidth):
    return max(sum(seconds), 2 * sum(parameters) / bandwidth) / 2


def half_of_the_work(seconds, parameters, bandwidth):
    return sum(seconds) / 2


tempting_1 = [two_stages, two_replicas, half_of_the_work]


def check_2(attempt):
    for here, there, sharpness in (
        (3e-3, 2.6e-3, 1e3),
        (3e-3, 3e-3, 1e3),
        (2.6e-3, 3e-3, 1e3),
        (529_424, 50_192, 10.0),
        (50_192, 529_424, 1e-6),
        (50_192, 529_424, 10.0),
    ):
        probability = exp(-sharpness * max(0, there - here))
        for chance in (0.01, 0.5, 0.6, 0.7, 0.99):
            found = attempt(here, there, sharpness, chance)
            if not isinstance(found, bool | np.bool_):
                return f"{found!r:.60} is neither True nor False"
            if found != (chance < probability):
                what = f"from {here:g} to {there:g}, sharpness {sharpness:g}, chance {chance:g}"
                return f"{what}: {found}, but the probability is {probability:.3g}"


def solution_2(here, there, sharpness, chance):
    return chance < exp(min(0, sharpness * (here - there)))


hints_2 = (
    "For which `here` and `there` is the argument of exp large? What should happen there?",
    "A step that is not slower is always taken: its probability is 1, not more.",
    "exp(min(0, ...)) is 1 for every step that is faster, and never overflows.",
)


def never_slower(here, there, sharpness, chance):
    return there <= here


def the_other_sign(here, there, sharpness, chance):
    return chance < exp(min(0, sharpness * (there - here)))


def only_the_size(here, there, sharpness, chance):
    return chance < exp(-sharpness * abs(here - there))


tempting_2 = [never_slower, the_other_sign, only_the_size]


def count(L, N):
    """Count one by one: the last stage has some layers and some ranks, the others the rest."""
    ways = {(0, 0): 1}
    for j in range(1, L + 1):
        for r in range(1, N + 1):
            ways[j, r] = sum(ways.get((i, q), 0) for i in range(j) for q in range(r))
    return ways[L, N]


def check_3(attempt):
    for L, N in ((1, 1), (1, 4), (2, 2), (3, 4), (5, 3), (16, 16)):
        found, right = attempt(L, N), count(L, N)
        if not is_number(found) or found != right:
            return f"{L} layers on {N} ranks: {right:,} pipelines, not {found!r:.60}"


def solution_3(L, N):
    return sum(comb(L - 1, s) * comb(N - 1, s) for s in range(L))


hints_3 = (
    "In how many ways can L layers be cut into a given number of stages? Each has one or more.",
    "s cuts among the L - 1 places between layers: comb(L - 1, s). With ranks it is the same.",
    "The sum over s of comb(L - 1, s) comb(N - 1, s).",
)


def layers_alone(L, N):
    return 2 ** (L - 1)


def both_freely(L, N):
    return 2 ** (L - 1) * 2 ** (N - 1)


tempting_3 = [layers_alone, both_freely]
