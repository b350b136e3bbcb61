"""Lesson 11's exercises: checks, worked solutions, hints, tempting wrong answers."""

from itertools import product

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.autograd import functions
from minidist.parallel.collective_functions import reduce_from, scatter
from minidist.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def array_of(found):
    """Return an answer as an array; lists of different lengths become their text."""
    try:
        return np.asarray(found)
    except ValueError:
        return np.array(repr(found))


def is_number(found):
    return not isinstance(found, list | tuple) and np.shape(found) == ()


def ranks(N, worker, *arguments):
    with Cluster(N, "thread") as cluster:
        return cluster.run(worker, *arguments)


def check_1(attempt):
    def own(group):
        return array_of(attempt(dy.copy(), group))

    dy = draw(99, 3, 8)
    for N in (2, 4):
        found = ranks(N, own)
        for rank, dx in enumerate(found):
            if dx.shape != dy.shape or dx.dtype.kind != "f":
                return f"rank {rank} has {dx!r:.60}, not an array of the shape {dy.shape}"
        x = [draw(r, 3, 8) for r in range(N)]
        left = (np.mean(x, axis=0) * dy).sum()
        right = sum((x_r * dx).sum() for x_r, dx in zip(x, found, strict=True))
        if not np.isclose(left, right, rtol=1e-9):
            return f"on {N} ranks <mean of X, dY> is {left:.3f}, but <X, dX> is {right:.3f}"
        if not np.allclose(found, dy / N, rtol=1e-9):
            return f"on {N} ranks another X has another inner product with your dX"


def solution_1(dy, group):
    return dy / group.size


hints_1 = (
    "How does the mean change if one number of this rank's array grows by 1?",
    "The inner product <mean, dY> is a sum over r of <X_r, something>. What is multiplied by X_r?",
    "mean = (X_0 + X_1 + ...) / N and dY is the same on every rank: no communication is needed.",
)


def as_g_does(dy, group):
    return dy


def mean_again(dy, group):
    return group.all_reduce(dy) / group.size


tempting_1 = [as_g_does, mean_again]


def training(group, row):
    """Return (loss, gradient of the bias) of three steps of a row layer."""
    x, targets = draw(1, 7, 12), draw(2, 7, 5)
    layer = RowParallelLinear(nn.Linear(12, 5, dtype="float64"), group)
    w, b, found = layer.weight, layer.bias, []
    for _ in range(3):
        y = row(scatter(Tensor(x), group), w, b, group)
        if not isinstance(y, Tensor) or y.shape != (7, 5):
            raise ValueError(f"a Tensor of the shape (7, 5) is needed, not {y!r:.60}")
        loss = nn.squared_error(y, targets)
        loss.backward()
        found.append((loss.item(), np.zeros(5) if b.grad is None else b.grad.copy()))
        for p in (w, b):
            p.data, p.grad = p.data - 0.1 * (0 if p.grad is None else p.grad), None
    return found


def check_2(attempt):
    (alone,) = ranks(1, training, broken_row)  # one rank has nothing to sum
    for rank, found in enumerate(ranks(4, training, attempt)):
        for step, ((loss, db), (right, right_db)) in enumerate(zip(found, alone, strict=True)):
            if not abs(loss / right - 1) < 1e-9:
                return f"in step {step} the loss is {loss:.4f}, not {right:.4f}"
            off = abs(db - right_db).max() / abs(right_db).max()
            if not off < 1e-9:
                return f"on rank {rank}, step {step}, the gradient of b is off by {off:.0%}"


def solution_2(x, w, b, group):
    return reduce_from(functions.linear(x, w), group) + b


hints_2 = (
    "What does the bias add to Y on 4 ranks, and what is the bias before the first update?",
    "It must be added once. Which value of Y is the same on every rank, so that b may be added?",
    "Add b after reduce_from: functions.linear(x, w) has no bias.",
)


def broken_row(x, w, b, group):
    return reduce_from(functions.linear(x, w, b), group)


def only_rank_0(x, w, b, group):
    return reduce_from(functions.linear(x, w, b if group.rank == 0 else None), group)


tempting_2 = [broken_row, only_rank_0]

WAYS = list(product(("column", "row"), repeat=2))


def numbers_sent(group, ways, widths):
    mend = ways != ("column", "row")

    def cut(way, layer):
        if way == "column":
            return ColumnParallelLinear(layer, group, gather_output=mend)
        return RowParallelLinear(layer, group, scatter_input=mend)

    layers = nn.MLP(widths, activation="gelu", dtype="float64").layers
    mlp = nn.Sequential([cut(*each) for each in zip(ways, layers, strict=True)])
    y = mlp(Tensor(np.ones((5, widths[0])), requires_grad=True))
    y.backward(np.ones(y.shape))
    return group.ledger.total / 8


def check_3(attempt):
    for ways, widths in product(WAYS, ((8, 32, 16), (16, 4, 8))):
        found, sent = attempt(ways, widths), sum(ranks(2, numbers_sent, ways, widths)) / 5
        if not is_number(found) or found != sent:
            return f"{' then '.join(ways)} of {widths} sends {sent:.0f} units, not {found!r:.60}"


def solution_3(ways, widths):
    before, between, after = widths
    if ways == ("column", "row"):
        return 2 * after + 2 * before
    first = {"column": between + 2 * before, "row": 2 * between + before}
    second = {"column": after + 2 * between, "row": 2 * after + between}
    return first[ways[0]] + second[ways[1]]


hints_3 = (
    "The comments in UNITS say what is sent. Which of the three widths does each array have?",
    "A column layer gathers its output and adds the gradient of its input; rows do the reverse.",
    "An all_reduce of an array of width C costs 2 C units, an all_gather to width C costs C.",
)


def as_if_square(ways, widths):
    units = dict(zip(WAYS, (15, 4, 18, 15), strict=True))
    return units[ways] * widths[0]


def only_forward(ways, widths):
    _, between, after = widths
    each = {"column": 1, "row": 2}
    return after * 2 if ways == ("column", "row") else each[ways[0]] * between + after


tempting_3 = [as_if_square, only_forward]
