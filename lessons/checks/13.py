"""Lesson 13's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.rng import Randomness
from minidist.tensor_parallel import unsplit
from minidist.tensor_parallel.sequence_parallel import sequence_parallel

B, T, C = 2, 8, 16
RANDOMNESS = Randomness(seed=0, step=0, examples=np.arange(B))


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


def mask_of(group, attempt, name, rate):
    return array_of(attempt(group, name, rate, RANDOMNESS, T, C))


def check_1(attempt):
    for name, rate, N in (("layer", 0.5, 4), ("other", 0.2, 2)):
        parts = ranks(N, mask_of, attempt, name, rate)
        for part in parts:
            if part.shape != (B, T // N, C) or part.dtype != bool:
                return f"a rank of {N} needs booleans {[B, T // N, C]}, not {part!r:.60}"
        same = np.concatenate(parts, axis=1) == RANDOMNESS.keep(name, rate, (B, T, C))
        if not same.all():
            return f"{same.mean():.0%} of it is one device's mask on {N} ranks"


def solution_1(group, name, rate, randomness, T, C):
    each = T // group.size
    window = slice(group.rank * each, (group.rank + 1) * each), slice(0, C)
    shape = len(randomness.examples), each, C
    return randomness.keep(name, rate, shape, window=window, full_shape=(T, C))


hints_1 = (
    "What do two ranks drop if both ask for a mask of the shape [B, T/N, C]?",
    "One example is [T, C]: that is full_shape. This rank has T/N rows of it, and all columns.",
    "window=(slice(r * T // N, (r + 1) * T // N), slice(0, C)), shape [B, T/N, C].",
)


def plain_call(group, name, rate, randomness, T, C):
    """All ranks drop the same elements of their parts."""
    return randomness.keep(name, rate, (len(randomness.examples), T // group.size, C))


def seed_per_rank(group, name, rate, randomness, T, C):
    own = Randomness(randomness.seed + group.rank, randomness.step, randomness.examples)
    return own.keep(name, rate, (len(randomness.examples), T // group.size, C))


tempting_1 = [plain_call, seed_per_rank]


def gradients(group, finish):
    """Return {name: whole gradient} of a block whose sequence is split over the group."""
    model = nn.Transformer(32, C, 4, 1, T, 0, "float64", dropout=0.1)
    block = sequence_parallel(model, group, check_weights=False).layers[1]
    x, dy = np.random.default_rng(0).standard_normal((2, B, T, C))
    y = block(Tensor(np.split(x, group.size, axis=1)[group.rank]), RANDOMNESS)
    y.backward(np.split(dy, group.size, axis=1)[group.rank])
    finish(block, group)
    named = block.named_parameters().items()
    return {name: np.asarray(unsplit(p.grad, p, group)) for name, p in named}


def check_2(attempt):
    (want,) = ranks(1, gradients, nothing)  # one rank: one device
    for got in ranks(4, gradients, attempt):
        right = [
            got[name].shape == want[name].shape and np.allclose(got[name], want[name], rtol=1e-9)
            for name in want
        ]
        wrong = [name for name, is_right in zip(want, right, strict=True) if not is_right]
        if wrong:
            names = ", ".join(name.removeprefix("blocks.0.") for name in wrong)
            return f"{len(wrong)} of {len(want)} gradients are off: {names}"


def solution_2(block, group):
    for p in block.parameters():
        if p.shard is None:
            p.grad = group.all_reduce(p.grad)


hints_2 = (
    "Which positions has a norm seen on this rank, and which one device's norm?",
    "A split parameter has a p.shard and its gradient is complete: its matrix saw all positions.",
    "all_reduce the gradients of those parameters whose p.shard is None, without a factor.",
)


def nothing(block, group):
    """As if every gradient were complete."""


def sum_everything(block, group):
    for p in block.parameters():
        p.grad = group.all_reduce(p.grad)


def average(block, group):
    for p in block.parameters():
        if p.shard is None:
            p.grad = group.all_reduce(p.grad) / group.size


tempting_2 = [nothing, sum_everything, average]


def one_step(group, L):
    model = nn.Transformer(32, C, 4, L, T)
    y = sequence_parallel(model, group, check_weights=False)(np.zeros((B, T), int))
    y.backward(np.ones_like(y.data))
    return group.ledger.total


def check_3(attempt):
    for N, L in ((1, 1), (2, 1), (4, 1), (2, 3)):
        found, sent = attempt(N, L), sum(ranks(N, one_step, L)) / (4 * B * T * C)
        if not is_number(found) or found != sent:
            return f"{found!r:.60} S for N = {N}, L = {L}; measured {sent:g}"


def solution_3(N, L):
    return (N - 1) * (10 * L + 5)


hints_3 = (
    "A block sends 10 (N - 1) S. What do the embedding and the logits add, forward and backward?",
    "The embedding ends like a branch: a reduce_scatter, and an all_gather in backward.",
    "The logits begin like a branch: all_gather, reduce_scatter, and one more all_gather for dW.",
)


def only_blocks(N, L):
    return 10 * (N - 1) * L


def logits_keep_x(N, L):
    return (N - 1) * (10 * L + 4)


tempting_3 = [only_blocks, logits_keep_x]
