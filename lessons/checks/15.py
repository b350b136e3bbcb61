"""Lesson 15's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.expert_parallel import ExpertParallel, expert_parameters
from minidist.expert_parallel.dispatch import Dispatch
from minidist.nn.datasets import shard
from minidist.nn.router import route
from minidist.rng import Randomness


def is_number(found):
    return not isinstance(found, list | tuple) and np.shape(found) == ()


def ranks(N, worker, *arguments):
    with Cluster(N, "thread") as cluster:
        return cluster.run(worker, *arguments)


def check_1(attempt):
    def booleans(part):
        found = attempt(part.copy(), capacity)
        try:
            found = np.asarray(found)
        except ValueError:  # rows of different lengths
            return None
        return found if found.shape == part.shape and found.dtype.kind in "biu" else None

    random = np.random.default_rng(1)
    for capacity in (1, 2, 5):
        chosen = np.argsort(random.random((3, 6, 4)), axis=-1)[..., :2]
        parts = chosen, chosen[-1:], chosen[:, :4]
        got, alone, early = (booleans(part) for part in parts)
        if got is None or alone is None or early is None:
            return "there is one answer, True or False, per choice: [B, T, k]"
        if not np.array_equal(got[-1:], alone):
            return "an example alone drops others than in its batch"
        if not np.array_equal(got[:, :4], early):
            return "later positions change what earlier ones drop"
        right = route(chosen, 4, capacity).kept
        if not np.array_equal(got, right):
            return f"{(got != right).sum()} of {right.size} choices differ, capacity {capacity}"


def solution_1(chosen, capacity):
    waiting, answer = {}, np.zeros(np.shape(chosen), bool)
    for (b, t, j), expert in np.ndenumerate(chosen):
        waiting[b, expert] = waiting.get((b, expert), 0) + 1
        answer[b, t, j] = waiting[b, expert] <= capacity
    return answer


hints_1 = (
    "One queue per example and expert: how long is it when a choice arrives?",
    "Walk through the positions in order; a position's first choice comes before its second.",
    "np.ndenumerate(chosen) yields ((b, t, j), expert) in this order; count in a dictionary.",
)


def by_queue(chosen, capacity, order):
    """Return what is kept if the choices queue in this order of their indices."""
    length, answer = {}, np.zeros(np.shape(chosen), bool)
    for index, key in order:
        length[key] = length.get(key, 0) + 1
        answer[index] = length[key] <= capacity
    return answer


def one_queue_for_the_batch(chosen, capacity):
    order = [((b, t, j), e) for (b, t, j), e in np.ndenumerate(chosen)]
    return by_queue(chosen, capacity, order)


def first_choices_first(chosen, capacity):
    """GShard's order."""
    order = [((b, t, j), (b, e)) for (b, t, j), e in np.ndenumerate(chosen)]
    return by_queue(chosen, capacity, sorted(order, key=lambda entry: entry[0][2]))


tempting_1 = [one_queue_for_the_batch, first_choices_first]

B, T, V = 10, 8, 12  # 10 examples: uneven shares on 4 ranks
TOKENS, TARGETS = np.random.default_rng(2).integers(0, V, (2, B, T))


def small():
    return nn.Transformer(V, 8, 2, 1, T, dtype="float64", experts=4, top_k=2)


def on_ranks(group, finish):
    model = ExpertParallel(small(), group, check_weights=False)
    mine = shard(np.arange(B), group.rank, group.size)
    logits = model.model(TOKENS[mine], Randomness(0, 0, mine, batch=B))
    nn.cross_entropy(logits, TARGETS[mine], reduction_size=TARGETS.size).backward()
    finish(model, expert_parameters(model.model))
    return model.whole({n: np.asarray(p.grad) for n, p in model.named_parameters().items()})


def check_2(attempt):
    alone = small()
    nn.cross_entropy(alone(TOKENS), TARGETS).backward()
    want = {name: p.grad for name, p in alone.named_parameters().items()}
    for got in ranks(4, on_ranks, attempt):
        right = {
            name: got[name].shape == dw.shape and np.allclose(got[name], dw, rtol=1e-9, atol=1e-13)
            for name, dw in want.items()
        }
        wrong = [name for name in want if not right[name]]
        if wrong:
            experts = sum(".experts." in name for name in wrong)
            return f"{len(wrong)} of {len(want)} gradients are off, {experts} of them of experts"


def solution_2(model, experts):
    for p in model.parameters():
        if p not in experts:
            p.grad = model.group.all_reduce(p.grad)


hints_2 = (
    "Which rows has an expert seen in forward: those of its own rank's examples, or of all ranks'?",
    "Each loss is divided by all targets already. What is then missing in a gate's gradient?",
    "p.grad = model.group.all_reduce(p.grad) for each p that is not in experts, without a factor.",
)


def divided(model, experts):
    model.sum_gradients()
    for p in experts:
        p.grad = p.grad / model.group.size


def sum_everything(model, experts):
    """The ranks' n-th experts are different ones."""
    for p in model.parameters():
        p.grad = model.group.all_reduce(p.grad)


def nothing(model, experts):
    """As if every gradient were complete."""


tempting_2 = [divided, sum_everything, nothing]


def travel(group, rows, C):
    """Send rows through experts that do nothing, forward and backward; return the bytes."""
    N, E = rows.shape
    load = rows[group.rank]
    x = Tensor(np.ones((load.sum(), C), "float32"), requires_grad=True)
    ends = [r * E // N for r in range(N + 1)]
    y = Dispatch(group, ends)([lambda part: part] * (E // N), x, load)
    y.backward(np.ones_like(y.data))
    return group.ledger.total


def check_3(attempt):
    for C, E in ((32, 8), (4, 12)):
        rows = np.random.default_rng(3).integers(0, 9, (4, E))
        for r, sent in enumerate(ranks(4, travel, rows, C)):
            found = attempt(rows.copy(), C, r)
            if not is_number(found) or found != sent:
                return f"with C = {C} and E = {E} rank {r} sends {sent} bytes, not {found!r:.60}"


def solution_3(rows, C, r):
    N, E = rows.shape
    pairs = rows.reshape(N, N, E // N).sum(axis=2)  # [from, to]
    away = pairs[r].sum() + pairs[:, r].sum() - 2 * pairs[r, r]
    return 2 * 4 * C * away + 8 * (N - 1) * (E // N)


hints_3 = (
    "Forward a rank sends counts, its own rows, and the results of the rows that came.",
    "rows.reshape(N, N, E // N).sum(axis=2)[i, j] is how many rows go from rank i to rank j.",
    "Backward sends as many rows as forward, and no counts. What stays on a rank is not sent.",
)


def own_rows_four_times(rows, C, r):
    N, E = rows.shape
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 4 * 4 * C * (own[r].sum() - own[r, r]) + 8 * (E - E // N)


def with_rows_that_stay(rows, C, r):
    N, E = rows.shape
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 2 * 4 * C * (own[r].sum() + own[:, r].sum()) + 8 * (E - E // N)


def without_counts(rows, C, r):
    N = len(rows)
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 2 * 4 * C * (own[r].sum() + own[:, r].sum() - 2 * own[r, r])


tempting_3 = [own_rows_four_times, with_rows_that_stay, without_counts]
