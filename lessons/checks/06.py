"""Lesson 6's exercises: checks, worked solutions, hints, tempting wrong answers."""

from fractions import Fraction
from numbers import Real

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.partition import partition
from minidist.planning import simulate


def check_1(attempt):
    random = np.random.default_rng(0)
    for _ in range(100):
        costs = random.integers(0, 9, random.integers(2, 8)).tolist()
        right, found = len(partition(costs, 2)[0]), attempt(list(costs))
        if not isinstance(found, Real) or found % 1 != 0:
            return f"for {costs} the result is {found!r:.60}, not a number of layers"
        if found != right:
            return f"{costs} should be cut after {right} layers, not {found}"


def solution_1(costs):
    return min(range(1, len(costs)), key=lambda i: max(sum(costs[:i]), sum(costs[i:])))


hints_1 = (
    "What do the two stages cost if the first one has i layers? Which of them decides?",
    "The first i layers cost sum(costs[:i]), the others sum(costs[i:]). The larger one decides.",
    "Try every i from 1 to len(costs) - 1. min() with a key returns the first of several.",
)


def as_many_layers(costs):
    return len(costs) // 2


def the_last_of_several(costs):
    choices = range(len(costs) - 1, 0, -1)
    return min(choices, key=lambda i: max(sum(costs[:i]), sum(costs[i:])))


tempting_1 = [as_many_layers, the_last_of_several]


def check_2(attempt):
    for times in ([1, 1], [1, 2, 3], [5, 1, 1, 1], [7]):
        halves = [Fraction(t, 2) for t in times]
        right = simulate(programs("layer_split", len(times), 3), halves, halves, 0).bubble
        found = attempt(list(times))
        if not isinstance(found, Real):
            return f"stages of {times}: the result is {found!r:.60}, not a number"
        if not np.isclose(float(found), float(right)):
            return f"stages of {times} are idle for {right} of the time, not {found}"


def solution_2(times):
    return 1 - Fraction(1, len(times))


hints_2 = (
    "How long does one batch take from the first forward to the last backward?",
    "It takes sum(times), and len(times) ranks are there all that time. How much do they work?",
    "All together they work sum(times) of len(times) * sum(times).",
)


def of_a_full_pipeline(times):
    return 1 - Fraction(sum(times), len(times) * max(times))


def of_the_first_rank(times):
    return 1 - Fraction(times[0], sum(times))


tempting_2 = [of_a_full_pipeline, of_the_first_rank]


def residual():
    """Return the stem, the two inner layers and the head of a small residual network."""
    stem, block, head = nn.ResidualMLP(64, 24, 1, 10, dtype="float64").layers
    return stem, *block.inner, head


def gradients(layers):
    return {p.name: p.grad for layer in layers for p in layer.parameters()}


def check_3(attempt):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 64)), random.integers(10, size=50)
    whole = stem, first, second, head = residual()
    s = stem(Tensor(x))
    nn.cross_entropy(head(s + second(first(s))), y).backward()
    want = gradients(whole)

    def worker(group):
        layers = residual()
        attempt(group, *layers, x, y)
        mine, others = layers[:2], layers[2:]
        if group.rank == 1:
            mine, others = others, mine
        for name, grad in gradients(others).items():
            if grad is not None:
                raise ValueError(f"rank {group.rank} has a gradient of {name}, of the other rank")
        return gradients(mine)

    with Cluster(2, "thread") as ranks:
        parts = ranks.run(worker)
    for name, found in (parts[0] | parts[1]).items():
        if found is None:
            return f"{name} has no gradient; leave one in its `.grad`"
        off = abs(found - want[name]).max() / abs(want[name]).max()
        if off > 1e-9:
            return f"the gradient of {name} is off by {off:.0%}"


def solution_3(group, stem, first, second, head, x, y):
    if group.rank == 0:
        s = stem(Tensor(x))
        leaf = Tensor(s.data, requires_grad=True)
        h = first(leaf)
        group.send(s.data, to=1)
        group.send(h.data, to=1)
        h.backward(group.recv(1))
        s.backward(leaf.grad + group.recv(1))
    else:
        s = Tensor(group.recv(0), requires_grad=True)
        h = Tensor(group.recv(0), requires_grad=True)
        nn.cross_entropy(head(s + second(h)), y).backward()
        group.send(h.grad, to=0)
        group.send(s.grad, to=0)


hints_3 = (
    "Two values go from rank 0 to rank 1. How many gradients have to come back?",
    "s is used twice, in first(s) and in the sum: its gradient is the sum of both parts.",
    "leaf = Tensor(s.data, requires_grad=True); h = first(leaf); h.backward(dh); then "
    "s.backward(leaf.grad + ds), with dh and ds from rank 1.",
)


def one_gradient_comes_back(group, stem, first, second, head, x, y):
    if group.rank == 0:
        s = stem(Tensor(x))
        h = first(s)
        group.send(s.data, to=1)
        group.send(h.data, to=1)
        h.backward(group.recv(1))
    else:
        s = Tensor(group.recv(0))
        h = Tensor(group.recv(0), requires_grad=True)
        nn.cross_entropy(head(s + second(h)), y).backward()
        group.send(h.grad, to=0)


def only_the_shortcut(group, stem, first, second, head, x, y):
    if group.rank == 0:
        s = stem(Tensor(x))
        h = first(Tensor(s.data))
        group.send(s.data, to=1)
        group.send(h.data, to=1)
        h.backward(group.recv(1))
        s.backward(group.recv(1))
    else:
        s = Tensor(group.recv(0), requires_grad=True)
        h = Tensor(group.recv(0), requires_grad=True)
        nn.cross_entropy(head(s + second(h)), y).backward()
        group.send(h.grad, to=0)
        group.send(s.grad, to=0)


def all_on_both_ranks(group, stem, first, second, head, x, y):
    s = stem(Tensor(x))
    nn.cross_entropy(head(s + second(first(s))), y).backward()


tempting_3 = [one_gradient_comes_back, only_the_shortcut, all_on_both_ranks]
