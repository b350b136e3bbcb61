"""Lesson 9's exercises: checks, worked solutions, hints, tempting wrong answers."""

from numbers import Real

import numpy as np

from minidist.pipeline_parallel import programs


def check_1(attempt):
    """Count the updates in the programs."""
    for p in (1, 2, 4):
        for r, program in enumerate(programs("pipedream", p, 9)):
            order = [str(action) for action in program]
            for i in range(9):
                between = order[order.index(f"F{i}") : order.index(f"B{i}")]
                want, got = sum(name[0] == "U" for name in between), attempt(i, r, p)
                if not isinstance(got, Real) or got != want:
                    return f"minibatch {i} on rank {r} of {p}: {want} updates, not {got!r:.60}"


def solution_1(i, r, p):
    return min(i, p - 1 - r)


hints_1 = (
    "Which version does F of minibatch i see? Which is the newest when B of it begins?",
    "F sees max(0, i - (p - 1 - r)). When B begins, all earlier minibatches have their updates.",
    "The newest version at B is i. Subtract. What is it for the first minibatches?",
)


def also_at_the_start(i, r, p):
    return p - 1 - r


def one_too_many(i, r, p):
    return min(i, p - r)


def nothing(*numbers):
    pass


tempting_1 = [also_at_the_start, one_too_many, nothing]


def grows(a, delay):
    """Return whether a solution z^n of w[n + 1] = w[n] - a w[n - delay] grows."""
    roots = np.roots([1, -1, *[0] * (delay - 1), a] if delay else [1, a - 1])
    return max(abs(roots)) >= 1


def check_2(attempt):
    for delay in range(8):
        low, high = 0.0, 3.0
        for _ in range(50):
            a = (low + high) / 2
            low, high = (low, a) if grows(a, delay) else (a, high)
        got = attempt(delay)
        if not isinstance(got, Real):
            return f"for a delay of {delay} the result is {got!r:.60}, not a number"
        if not abs(got - low) < 1e-6:
            return f"for a delay of {delay} it is {low:.3f}, not {got:.3f}"


def solution_2(delay):
    return 2 * np.sin(np.pi / (4 * delay + 2))


hints_2 = (
    "Put w[n] = z^n. At the limit a z is on the unit circle: z = exp(i t). What does t have to be?",
    "z^delay (z - 1) = -a. Compare the angles: z - 1 has the angle (t + pi)/2, and -a has pi.",
    "So t = pi/(2 delay + 1). Now compare the lengths: z - 1 has the length 2 sin(t/2).",
)


def by_the_delay(delay):
    return 2 / (delay + 1)


def halved_each_time(delay):
    return 2 / 2**delay


tempting_2 = [by_the_delay, halved_each_time, nothing]


def check_3(attempt):
    goals = np.random.default_rng(0).standard_normal((16, 3))
    seen = []

    def gradient(w, i):
        seen.append((i, np.array(w)))
        return w - goals[i]

    for delay in (0, 1, 3):
        versions = [np.ones(3)]
        for i in range(16):
            used = versions[max(0, i - delay)]
            versions.append(versions[-1] - 0.2 * (used - goals[i]))
        seen.clear()
        got = attempt(gradient, np.ones(3), 16, delay)
        if [i for i, _ in seen] != list(range(16)):
            return f"gradients of the minibatches {[i for i, _ in seen]}, not of 0 to 15 in turn"
        for i, w in seen:
            if not np.allclose(w, versions[max(0, i - delay)]):
                where = f"delay {delay}, minibatch {i}: the gradient is not"
                return f"{where} of version {max(0, i - delay)}, with that many updates in it"
        if np.shape(got) != (3,):
            return f"the result is {got!r:.60}, not weights of the shape (3,)"
        if not np.allclose(got, versions[-1]):
            return f"delay {delay}: all gradients are right, but the last weights are not"


def solution_3(gradient, w, updates, delay):
    stashed = {}
    for i in range(updates + delay):
        if i < updates:
            stashed[i] = w
        if i >= delay:
            w = w - 0.2 * gradient(stashed.pop(i - delay), i - delay)
    return w


hints_3 = (
    "With 16 updates and a delay of 3: how many gradients are in the weights at the end?",
    "`w = stashed.pop(i)` forgets the updates that came after the forward of minibatch i.",
    "Two weights take part in an update: the gradient is of the stashed, and goes to the newest.",
)


def from_the_stash(gradient, w, updates, delay):
    stashed = {}
    for i in range(updates + delay):
        if i < updates:
            stashed[i] = w
        if i >= delay:
            w = stashed.pop(i - delay)
            w = w - 0.2 * gradient(w, i - delay)
    return w


def of_the_newest(gradient, w, updates, delay):
    for i in range(updates):
        w = w - 0.2 * gradient(w, i)
    return w


def in_place(gradient, w, updates, delay):
    stashed = {}
    for i in range(updates + delay):
        if i < updates:
            stashed[i] = w
        if i >= delay:
            w -= 0.2 * gradient(stashed.pop(i - delay), i - delay)
    return w


def the_last_updates_lost(gradient, w, updates, delay):
    stashed = {}
    for i in range(updates):
        stashed[i] = w
        if i >= delay:
            w = w - 0.2 * gradient(stashed.pop(i - delay), i - delay)
    return w


tempting_3 = [from_the_stash, of_the_newest, in_place, the_last_updates_lost, nothing]
