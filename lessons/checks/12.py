"""Lesson 12's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelTransformer,
    vocab_parallel,
)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def array_of(found):
    """Return an answer as an array; lists of different lengths become their text."""
    try:
        return np.asarray(found)
    except ValueError:
        return np.array(repr(found))


def ranks(N, worker, *arguments):
    with Cluster(N, "thread") as cluster:
        return cluster.run(worker, *arguments)


def attend(group, choose, x):
    """Return Y of an attention layer whose QKV is cut this way, and Y of the whole layer."""
    whole = nn.CausalSelfAttention(16, 4, dtype="float64")
    split, each = ParallelAttention(whole, group), 3 * 16 // group.size
    columns = array_of(choose(16, 4, group.rank, group.size))
    if columns.shape != (each,) or columns.dtype.kind not in "iu":
        raise ValueError(f"a rank of {group.size} needs {each} indices, not {columns!r:.60}")
    if not set(columns.tolist()) <= set(range(48)):
        raise ValueError(f"the columns are 0 to 47, not {columns!r:.60}")
    split.qkv = ColumnParallelLinear(whole.qkv, group, columns=columns)
    return split(Tensor(x)).data, whole(Tensor(x)).data


def check_1(attempt):
    for N in (2, 4):
        for got, right in ranks(N, attend, attempt, draw(1, 2, 5, 16)):
            off = np.linalg.norm(got - right) / np.linalg.norm(right)
            if not off < 1e-12:
                return f"on {N} ranks the output is off by {off:.0%}"


def solution_1(width, heads, rank, size):
    columns = np.arange(3 * width).reshape(3, heads, -1)
    return np.split(columns, size, axis=1)[rank].reshape(-1)


hints_1 = (
    "Which of q, k and v does rank 0 of 2 get by equal runs?",
    "np.arange(3 * width).reshape(3, heads, -1) has the heads as an axis: cut that one.",
    "np.split(columns, size, axis=1)[rank].reshape(-1)",
)


def equal_runs(width, heads, rank, size):
    return np.array_split(np.arange(3 * width), size)[rank]


def every_nth_head(width, heads, rank, size):
    """Whole heads, but not the ones whose rows of the output matrix the rank has."""
    return np.arange(3 * width).reshape(3, heads, -1)[:, rank::size].reshape(-1)


tempting_1 = [equal_runs, every_nth_head]


def find_words(group, attempt, z):
    own = np.split(z, group.size, axis=1)[group.rank]
    return array_of(attempt(own, group)), group.ledger.total


def check_2(attempt):
    z = draw(2, 6, 40)
    z[0] = 0  # all equal
    z[1, [5, 25]] = 9  # two winners on two ranks
    right = z.argmax(axis=1)
    for N in (2, 4):
        for words, sent in ranks(N, find_words, attempt, z):
            if words.shape != right.shape or not np.array_equal(words, right):
                return f"{words!s:.60} on {N} ranks, where {right} is right"
            if sent > 2 * 8 * 6 * (N - 1):
                return f"the words are right, but a rank of {N} sends {sent} bytes"


def solution_2(z, group):
    best = group.all_gather(z.max(axis=1)[None])
    words = group.all_gather(z.argmax(axis=1)[None] + group.rank * z.shape[1])
    return np.take_along_axis(words, best.argmax(axis=0)[None], axis=0)[0]


hints_2 = (
    "Each rank has a candidate: its largest logit and the word that it belongs to.",
    "group.all_gather(x[None]) stacks what the ranks have to [N, B]. Rank r begins at word r V/N.",
    "np.take_along_axis(words, best.argmax(axis=0)[None], axis=0)[0] takes the winner's word.",
)


def join_the_logits(z, group):
    return group.all_gather(z, axis=1).argmax(axis=1)


def forget_where_it_began(z, group):
    best = group.all_gather(z.max(axis=1)[None])
    words = group.all_gather(z.argmax(axis=1)[None])
    return np.take_along_axis(words, best.argmax(axis=0)[None], axis=0)[0]


def largest_word_wins(z, group):
    best = group.all_reduce(z.max(axis=1), op="max")
    own = np.where(z.max(axis=1) == best, z.argmax(axis=1) + group.rank * z.shape[1], -1)
    return group.all_reduce(own, op="max")


tempting_2 = [join_the_logits, forget_where_it_began, largest_word_wins]

TOKENS, TARGETS = np.random.default_rng(3).integers(0, 103, (2, 3, 8))


def small():
    return nn.Transformer(103, 16, 4, 1, 8, dtype="float64")


def find_length(group, attempt):
    model = ParallelTransformer(small(), group)
    vocab_parallel.cross_entropy(model(TOKENS), TARGETS, group=group, vocab=103).backward()
    before = group.ledger.total
    found = array_of(attempt(model, group))
    if found.size != 1 or found.dtype.kind not in "fiu":
        raise ValueError(f"the result is {found!r:.60}, not a number")
    return float(found.reshape(())), group.ledger.total - before


def check_3(attempt):
    model = small()
    nn.cross_entropy(model(TOKENS), TARGETS).backward()
    right = sum((p.grad**2).sum() for p in model.parameters()) ** 0.5
    for N in (2, 4):
        for length, sent in ranks(N, find_length, attempt):
            if not abs(length / right - 1) < 1e-9:
                return f"{length / right:.4f} of the right length on {N} ranks"
            if sent > 2 * N * 8:
                return f"the length is right, but a rank sends {sent} bytes; one number is enough"


def solution_3(model, group):
    squares = {True: 0.0, False: 0.0}
    for p in model.parameters():
        squares[p.shard is not None] += (p.grad**2).sum()
    return (squares[False] + group.all_reduce(np.array(squares[True]))) ** 0.5


hints_3 = (
    "How many times would a norm's gradient count if every rank added its squares?",
    "Add the squares of the parts over the ranks. A whole gradient, which all have, counts once.",
    "group.all_reduce(np.array(x)) adds one number; then add the squares where p.shard is None.",
)


def all_squares(model, group):
    own = sum((p.grad**2).sum() for p in model.parameters())
    return group.all_reduce(np.array(own)) ** 0.5


def own_squares(model, group):
    return sum((p.grad**2).sum() for p in model.parameters()) ** 0.5


tempting_3 = [all_squares, own_squares]
