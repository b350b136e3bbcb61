"""Lesson 5's exercises: checks, worked solutions, hints, tempting wrong answers."""

from numbers import Real

import numpy as np

from minidist import Cluster, nn, optim
from minidist.data_parallel.zero import Zero
from minidist.planning.costs.zero import zero_elements


def check_1(attempt):
    """Compare with a search over N."""
    each = (2, 2, 12)
    for stage in range(4):
        for P, memory in ((7500, 80000), (7500, 30000), (7500, 15100), (7500, 15000), (16, 256)):
            held = zip(each, zero_elements(stage, P, 0, 0), strict=True)
            whole = sum(bytes_each * elements for bytes_each, elements in held)
            shared = 16 * P - whole
            want = next((N for N in range(1, 2000) if whole * N + shared <= memory * N), None)
            found = attempt(stage, P, memory, each)
            case = f"stage {stage}, {P} parameters, {memory} bytes on each rank"
            if found is not None and not (isinstance(found, Real) and found % 1 == 0):
                return f"{case}: {found!r:.60} is neither a whole number nor None"
            if found != want:
                return f"{case}: {want} ranks, not {found}"


def solution_1(stage, P, memory, each):
    whole, shared = sum(each[: 3 - stage]) * P, sum(each[3 - stage :]) * P
    if whole + shared <= memory:
        return 1
    if whole >= memory or shared == 0:
        return None
    return -(-shared // (memory - whole))


hints_1 = (
    "Which of the three kinds does each stage cut? Add up what all ranks keep whole, and the rest.",
    "The whole part must leave room: memory - whole is what a rank has for its shard.",
    "N = shared / (memory - whole), rounded up; None if nothing is left, or if nothing is cut.",
)


def all_is_cut(stage, P, memory, each):
    return -(-sum(each) * P // memory)


def rounds_down(stage, P, memory, each):
    exact = solution_1(stage, P, memory, each)
    whole, shared = sum(each[: 3 - stage]) * P, sum(each[3 - stage :]) * P
    return exact if exact in (1, None) else shared // (memory - whole)


tempting_1 = [all_is_cut, rounds_down]


def moved_by(group, stage, m):
    """Return the elements that this rank sends for m micro-batches, of a model of 40 parameters."""
    model = nn.MLP([4, 4, 4]).flatten(group.empty)
    zero = Zero(model, group, stage)
    for i in range(m):
        loss = nn.cross_entropy(model(np.ones((2, 4), np.float32)), np.zeros(2, int), 4 * m)
        zero.accumulate(loss, last=i == m - 1)
    zero.step(optim.SGD(zero.parameters(), 0.1))
    return sum(part.ledger.total for part in zero.groups) // 4


def check_2(attempt):
    with Cluster(4, "thread") as ranks:
        for stage, m in [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3), (3, 3)]:
            found, sent = attempt(stage, 40, 4, m), ranks.run(moved_by, stage, m)[0]
            if not isinstance(found, Real):
                return f"stage {stage}, m = {m}: {found!r:.60} is not a number"
            if not np.isclose(found, sent):
                return f"stage {stage}, m = {m}, P = 40, N = 4: {sent} were sent, not {found:g}"


def solution_2(stage, P, N, m):
    passes = {1: 2, 2: m + 1, 3: 3 * m}[stage]
    return passes * P * (N - 1) / N


hints_2 = (
    "A reduce_scatter or an all_gather sends P (N - 1)/N. How many of them does each stage need?",
    "A stage without memory for whole gradients must scatter those of each micro-batch at once.",
    "Stage 1: 2. Stage 2: m scatters, and one gather. Stage 3: two gathers for each scatter.",
)


def as_if_m_were_1(stage, P, N, m):
    return (3 if stage == 3 else 2) * P * (N - 1) / N


def everything_m_times(stage, P, N, m):
    return m * (3 if stage == 3 else 2) * P * (N - 1) / N


tempting_2 = [as_if_m_were_1, everything_m_times]


def check_3(attempt):
    gradient = np.arange(1.0, 8.0)

    def worker(group):
        shard = np.array_split(gradient, group.size)[group.rank]
        return attempt(group, np.array(shard @ shard))

    for N in (1, 3, 4):
        with Cluster(N, "thread") as ranks:
            for rank, found in enumerate(ranks.run(worker)):
                if np.ndim(found) > 0 or np.asarray(found).dtype.kind not in "fi":
                    return f"rank {rank} of {N} gets {found!r:.60}, not one number"
                if not np.isclose(float(found), gradient @ gradient):
                    return f"rank {rank} of {N} gets {float(found):g}; |dW|^2 is 140"


def solution_3(group, squares):
    return group.all_reduce(squares)


hints_3 = (
    "Which rank updates an element? On which ranks does its update depend, if it is clipped?",
    "|dW|^2 is a sum over all elements, and each rank has the elements of its shard.",
    "One number from each rank: an all_reduce of the squares.",
)


def only_mine(group, squares):
    return squares


def as_if_all_were_mine(group, squares):
    return group.size * squares


def the_mean(group, squares):
    return group.all_reduce(squares) / group.size


tempting_3 = [only_mine, as_if_all_were_mine, the_mean]
