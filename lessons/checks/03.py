"""Lesson 3's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numbers

import numpy as np

from minidist import Cluster, nn
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.events import EventLog
from minidist.nn.datasets import digits

images, labels = digits("float64")


def one_device(model, batch):
    """Return {name: gradient} of the batch's mean loss."""
    nn.cross_entropy(model(images[batch]), labels[batch]).backward()
    return {p.name: p.grad for p in model.parameters()}


def what_is_wrong(found, want):
    """Compare the gradients of all ranks, [{name: gradient}, ...], with the right ones."""
    for rank, gradients in enumerate(found):
        for name, right in want.items():
            if np.shape(gradients[name]) != right.shape:
                shape = np.shape(gradients[name])
                return f"{name} on rank {rank} has a gradient of shape {shape}, not {right.shape}"
            error = abs(gradients[name] - right).max() / abs(right).max()
            if not error < 1e-9:
                return f"the gradient of {name} is off by {error:.0%} on rank {rank}"


def reduced_by(group, attempt, model, batch):
    mine = np.array_split(batch, group.size)[group.rank]
    logits = model(images[mine])
    nn.cross_entropy(logits, labels[mine], reduction_size=len(batch)).backward()
    attempt(group, model)
    return {p.name: p.grad for p in model.parameters()}


def check_1(attempt):
    sizes, batch, log = [64, 32, 16, 10], np.arange(6), EventLog()
    with Cluster(4, "thread") as cluster:
        model = nn.MLP(sizes, dtype="float64")
        found = cluster.run(reduced_by, attempt, model, batch, log=log)
    if fault := what_is_wrong(found, one_device(nn.MLP(sizes, dtype="float64"), batch)):
        return fault
    calls = [e.name for e in log.events if e.rank == 0 and e.category == "communication"]
    if len(calls) != 3:
        return f"the sums are right, but a rank communicates {len(calls)} times for 3 layers"


def solution_1(group, model):
    for layer in model.layers:
        parameters = layer.parameters()
        flat = group.all_reduce(np.concatenate([p.grad.reshape(-1) for p in parameters]))
        pieces = np.split(flat, np.cumsum([p.size for p in parameters])[:-1])
        for p, piece in zip(parameters, pieces, strict=True):
            p.grad = piece.reshape(p.shape)


hints_1 = (
    "np.concatenate([p.grad.reshape(-1) for p in layer.parameters()]) is one flat array.",
    "After the all_reduce, cut it where the parameters end: they have p.size elements each.",
    "np.split(flat, np.cumsum([p.size for p in parameters])[:-1]); then reshape(p.shape).",
)


def one_call_per_parameter(group, model):
    all_reduce_gradients(model, group)


def flat_gradients(group, model):
    for layer in model.layers:
        parameters = layer.parameters()
        flat = group.all_reduce(np.concatenate([p.grad.reshape(-1) for p in parameters]))
        pieces = np.split(flat, np.cumsum([p.size for p in parameters])[:-1])
        for p, piece in zip(parameters, pieces, strict=True):
            p.grad = piece


tempting_1 = [one_call_per_parameter, flat_gradients, lambda group, model: None]


def check_2(attempt):
    for N, want in {1: 1.0, 2: 1.61538, 8: 3.0, 1000: 4.18659}.items():
        found = attempt(N, 0.1, 0.005, 1e8, 1e10)  # 0.1 s, 5 ms, 100 MB over 10 GB/s
        if not isinstance(found, numbers.Real):
            return f"{found!r:.60} is not a factor"
        if not abs(found - want) < 1e-3:
            return (
                f"0.1 s of compute, 5 ms of update, 100 MB over 10 GB/s: {N} ranks are "
                f"{want:.2f} times as fast as one, not {found:.2f} times"
            )


def solution_2(N, compute, update, S, link):
    return (compute + update) / (compute / N + update + 2 * (N - 1) / N * S / link)


hints_2 = (
    "A step is compute, then the sum of the gradients, then the update. What shrinks with N?",
    "Each rank updates all parameters. One rank sends nothing; N ranks send 2 (N - 1) S / N each.",
    "Time of one rank: compute + update. Of N: compute / N + 2 (N - 1) / N S / link + update.",
)


def forgets_the_update(N, compute, update, S, link):
    return compute / (compute / N + 2 * (N - 1) / N * S / link)


def shares_the_update(N, compute, update, S, link):
    return (compute + update) / ((compute + update) / N + 2 * (N - 1) / N * S / link)


tempting_2 = [forgets_the_update, shares_the_update, lambda N, compute, update, S, link: None]


class NeverEmpty(nn.MLP):
    """A model that refuses an empty batch."""

    def forward(self, x, randomness=None):
        if len(x) == 0:
            raise ValueError("this model needs an example, and the shard has none")
        return super().forward(x, randomness)


BATCHES = (np.arange(3), np.arange(3, 8))


def two_batches(group, attempt, model):
    gradients = []
    for batch in BATCHES:
        mine = np.array_split(batch, group.size)[group.rank]
        attempt(group, model, images[mine], labels[mine], len(batch))
        gradients.append({p.name: p.grad for p in model.parameters()})
        for p in model.parameters():
            p.grad = None
    return gradients


def check_3(attempt):
    with Cluster(4, "thread") as cluster:
        model = NeverEmpty([64, 16, 10], dtype="float64")
        found = cluster.run(two_batches, attempt, model)
    for k, batch in enumerate(BATCHES):
        want = one_device(NeverEmpty([64, 16, 10], dtype="float64"), batch)
        gradients = [rank[k] for rank in found]
        if any(g is None for rank in gradients for g in rank.values()):
            return f"batch of {len(batch)}: a rank has no gradient (p.grad is None)"
        if fault := what_is_wrong(gradients, want):
            return f"batch of {len(batch)}: {fault}"


def solution_3(group, model, x, y, B):
    if len(x) > 0:
        nn.cross_entropy(model(x), y, reduction_size=B).backward()
    all_reduce_gradients(model, group)


hints_3 = (
    "A collective needs all ranks of its group, also those that have nothing to add.",
    "Only the backward may be skipped. Then p.grad is None; what must this rank add instead?",
    "Zeros of p's shape: np.zeros_like(p.data). (all_reduce_gradients(model, group) does it.)",
)


def skips_if_empty(group, model, x, y, B):
    if len(x) > 0:
        nn.cross_entropy(model(x), y, reduction_size=B).backward()
        all_reduce_gradients(model, group)


def mean_of_the_shard(group, model, x, y, B):
    if len(x) > 0:
        nn.cross_entropy(model(x), y).backward()
    all_reduce_gradients(model, group)


tempting_3 = [skips_if_empty, mean_of_the_shard, lambda group, model, x, y, B: None]
