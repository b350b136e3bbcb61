"""Lesson 19's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster


def largest(v):
    """Send the largest of the elements alone."""
    return np.where(abs(v) == abs(v).max(), v, 0)


def half(v):
    return v / 2


def check_1(attempt):
    for rule, steps in ((largest, 10), (half, 100)):
        send, given, arrived = attempt(rule), 0.0, 0.0
        if not callable(send):
            return f"the result is {send!r:.60}, not a function"
        for step in range(50 + steps):
            gradient = np.array([1.0, -2.0, 4.0, 8.0]) * (step < 50)  # then nothing new comes
            sent = send(gradient.copy())
            if np.shape(sent) != (4,):
                return f"for 4 elements it returns {sent!r:.60}"
            given, arrived = given + gradient, arrived + np.asarray(sent)
        if not np.allclose(given, arrived, rtol=1e-12):
            return f"of {given} these are missing: {given - arrived}"
    one, other = attempt(largest), attempt(largest)
    one(np.array([1.0, 2.0]))
    if np.any(other(np.zeros(2))):
        return "two functions share one memory"


def solution_1(rule):
    owed = [0.0]

    def send(gradient):
        v = gradient + owed[0]
        sent = rule(v)
        owed[0] = v - sent
        return sent

    return send


hints_1 = (
    "What is owed has to survive the call: `nonlocal`, or a list of one element.",
    "The rule chooses from v, the gradient plus what is owed.",
    "After it, v less what was sent is owed: not the gradient less what was sent.",
)


def forgets(rule):
    return rule


def owes_of_the_last_gradient(rule):
    owed = [0.0]

    def send(gradient):
        sent = rule(gradient + owed[0])
        owed[0] = gradient - sent
        return sent

    return send


shared = {}


def one_memory_for_all(rule):
    def send(gradient):
        v = gradient + shared.get(gradient.shape, 0.0)
        sent = rule(v)
        shared[gradient.shape] = v - sent
        return sent

    return send


tempting_1 = [forgets, owes_of_the_last_gradient, one_memory_for_all, lambda rule: None]


def check_2(attempt):
    random = np.random.default_rng(0)
    for n, k in ((4, 4), (20, 5), (100, 3)):
        places = np.stack([random.permutation(n)[:k] for _ in range(3)])
        values = random.integers(-9, 10, (3, k)).astype(float)
        want = sum(np.bincount(p, v, n) for p, v in zip(places, values, strict=True))
        found = attempt(places.copy(), values.copy(), n)
        if np.shape(found) != (n,):
            return f"the result {found!r:.60} has the shape {np.shape(found)}, not ({n},)"
        if not np.allclose(found, want):
            wrong = np.sum(~np.isclose(found, want))
            return f"{k} of {n} elements from each of three ranks: {wrong} elements are wrong"


def solution_2(places, values, n):
    return np.bincount(places.ravel(), values.ravel(), n)


hints_2 = (
    "What does total[[0, 0]] += [1, 2] do to total[0]?",
    "NumPy takes a copy of the chosen elements, adds, and writes the copy back: the last one wins.",
    "np.add.at(total, places, values) adds each of them; so does np.bincount.",
)


def one_line(places, values, n):
    total = np.zeros(n)
    total[places] += values
    return total


def summed_by_row(places, values, n):
    total = np.zeros(n)
    total[places[0]] = values.sum(axis=0)
    return total


tempting_2 = [one_line, summed_by_row, lambda places, values, n: None]


def bytes_of(group, n, k, dtype):
    """Return the bytes that this rank sends in an all_reduce of n elements, and for top_k."""
    group.all_reduce(np.zeros(n, dtype))
    plain = group.ledger.total
    group.all_gather(np.zeros(k, dtype))
    group.all_gather(np.zeros(k, "uint32"))
    return plain, group.ledger.total - plain


def check_3(attempt):
    for N, n, dtype in ((4, 1001, "float32"), (4, 1000, "float64"), (2, 96, "float32")):
        k = attempt(n, N, np.dtype(dtype).itemsize)
        if isinstance(k, bool) or not isinstance(k, int | np.integer):
            return f"n = {n}, {dtype}: {k!r:.60} is no int"
        if not 0 < k <= n:
            return f"n = {n}, {N} ranks: k = {k} is not between 1 and n"
        with Cluster(N, "thread") as ranks:
            for more, fits in ((0, True), (1, False)):
                plain, sparse = np.sum(ranks.run(bytes_of, n, k + more, dtype), axis=0)
                if (sparse <= plain) != fits:
                    return (
                        f"{N} ranks, n = {n}, {dtype}: k = {k + more} sends {sparse} bytes, an "
                        f"all_reduce {plain}"
                    )


def solution_3(n, N, itemsize):
    return 2 * n * itemsize // (N * (itemsize + 4))


hints_3 = (
    "Write both numbers of bytes, for all ranks; the table has them for float32.",
    "An all_reduce: 2 (N - 1) n itemsize; two all_gathers: N (N - 1) k (itemsize + 4).",
    "N - 1 cancels. k is rounded down: //.",
)


def without_places(n, N, itemsize):
    return 2 * n // N


def for_two_ranks(n, N, itemsize):
    return n * itemsize // (itemsize + 4)


def a_part_of_an_element(n, N, itemsize):
    return 2 * n * itemsize / (N * (itemsize + 4))


tempting_3 = [without_places, for_two_ranks, a_part_of_an_element, lambda n, N, itemsize: None]
