"""Lesson 25's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, datasets, nn
from minidist.nn.embedding import BEGIN, END, PAD


def is_number(found):
    kinds = int | float | np.integer | np.floating
    return isinstance(found, kinds) and not isinstance(found, bool) and abs(found) < 1e300


def sent(group, P):
    group.all_reduce(np.ones(P, "float32"))
    return group.ledger.total


def check_1(attempt):
    """Compare with the bytes of an all_reduce, and with the messages of workers."""
    for P, N in ((12_000, 2), (12_000, 4), (600, 3)):
        with Cluster(N, "thread") as ranks:
            data = sum(ranks.run(sent, P))
        found, what = attempt(P, N), f"P = {P:,}, N = {N}"
        if not isinstance(found, tuple | list | np.ndarray) or np.shape(found) != (2,):
            return f"{what}: {found!r:.60}, not two numbers of bytes"
        if not all(is_number(one) for one in found):
            return f"{what}: {found!r:.60}, not two numbers of bytes"
        if not np.isclose(found[0], data, rtol=1e-9):
            return f"{what}: an all_reduce of the gradient sends {data:,} bytes, not {found[0]:,}"
        messages = [4 * P for _ in range(N) for _ in ("pull", "push")]
        if not np.isclose(found[1], sum(messages), rtol=1e-9):
            many = len(messages)
            return f"{what}: {many} messages with the server are {sum(messages):,} bytes in all"


def solution_1(P, N):
    return 2 * (N - 1) * 4 * P, 2 * N * 4 * P


hints_1 = (
    "What does an all_reduce of S bytes send on N ranks, all together? Lesson 2, lesson 3.",
    "A worker pulls all weights (the server sends them) and pushes a gradient of the same size.",
    "2 (N - 1) S and 2 N S, with S = 4 P.",
)


def gradients_once(P, N):
    return (N - 1) * 4 * P, 2 * N * 4 * P


def pushes_alone(P, N):
    return 2 * (N - 1) * 4 * P, N * 4 * P


def of_one_rank(P, N):
    return 2 * (N - 1) * 4 * P / N, 2 * 4 * P


tempting_1 = [gradients_once, pushes_alone, of_one_rank]


def check_2(attempt):
    pairs = datasets.numbers(examples=200, held_out=20)
    (inputs, targets), S = pairs.train, pairs.source_length
    for rows in (slice(0, 50), slice(50, 51)):
        right, found = inputs[rows, S:], attempt(targets[rows].copy())
        try:
            found = np.asarray(found)
        except ValueError:
            return f"{found!r:.60} is no array of tokens"
        if found.shape != right.shape:
            return f"the shape is {found.shape}, not {right.shape}"
        if not np.array_equal(found, right):
            row = int(np.argmax((found != right).any(axis=1)))
            read, words = found[row].tolist(), targets[rows][row].tolist()
            return f"targets {words} (END {END}, IGNORED {nn.IGNORED}): it must not read {read}"


def solution_2(targets):
    from minidist.nn.embedding import BEGIN, END, PAD

    known = np.where((targets == END) | (targets == nn.IGNORED), PAD, targets)
    return np.concatenate([np.full((len(targets), 1), BEGIN), known[:, :-1]], axis=1)


hints_2 = (
    "Column t predicts targets[:, t]. Which targets are known by then? Which one is the last?",
    "Shift the targets by one column to the right, with BEGIN in front; the last column goes.",
    "END and IGNORED are not read: they become PAD.",
)


def the_answers(targets):
    return np.where(targets == nn.IGNORED, PAD, targets)


def with_end(targets):
    tokens = np.roll(the_answers(targets), 1, axis=1)
    tokens[:, 0] = BEGIN
    return tokens


tempting_2 = [the_answers, with_end]


def check_3(attempt):
    random = np.random.default_rng(0)
    for beginnings, V, keep in ((1, 5, 3), (3, 7, 3), (4, 2, 5)):
        scores = np.log(random.random(beginnings))
        following = np.log(random.random((beginnings, V)))
        every = [(scores[i] + following[i, v], i, v) for i in range(beginnings) for v in range(V)]
        best = sorted(every, reverse=True)[:keep]
        found, what = attempt(scores, following, keep), f"{beginnings} beginnings, {V} words"
        if not isinstance(found, tuple | list) or len(found) != 3:
            return f"the result is {found!r:.60}, not (beginning, word, score)"
        if not all(np.ndim(part) == 1 and len(part) == keep for part in found):
            return f"{what}: the parts are no sequences of {keep}"
        chosen = [*zip(*found[:2], strict=True)]
        if chosen != [(i, v) for _, i, v in best]:
            kept = [(int(i), int(v)) for _, i, v in best]
            return f"{what}: the best {keep} are {kept} (beginning, word), not {chosen!r:.99}"
        if not np.allclose(np.asarray(found[2], float), [score for score, _, _ in best]):
            return f"{what}: the scores are {found[2]!r:.99}"


def solution_3(scores, following, keep):
    total = scores[:, None] + following
    order = np.argsort(-total, axis=None)[:keep]
    beginning, word = np.divmod(order, following.shape[1])
    return beginning, word, total.reshape(-1)[order]


hints_3 = (
    "The score of a longer beginning is a sum of two logarithms. How many candidates are there?",
    "Take the `keep` largest of all sums at once, not the best of each beginning.",
    "np.argsort of the flat array, then np.divmod by V gives beginning and word back.",
)


def best_of_each(scores, following, keep):
    word = following.argmax(axis=1)
    return list(range(len(scores))), word, scores + following.max(axis=1)


def words_alone(scores, following, keep):
    order = np.argsort(-following, axis=None)[:keep]
    beginning, word = np.divmod(order, following.shape[1])
    return beginning, word, following.reshape(-1)[order]


tempting_3 = [best_of_each, words_alone]
