"""Trainings under parameter servers: what the tests run on ranks, and what they look at."""

import time
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.data_parallel.parameter_server import Server, join, train
from minidist.rng import Randomness
from minidist.verify.strategies.parameter_server import replay_server

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    # A large eps: some gradients are zero but for rounding, which a small one would raise.
    "adagrad": partial(optim.Adagrad, lr=0.1, eps=1e-4),
    "adamw": partial(optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-4),
}


def mlp_data(count, rows=5, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((count, rows, 4)), random.integers(0, 3, (count, rows))


def mlp():
    return nn.MLP([4, 7, 3], "gelu", dtype="float64")


def backward_on(inputs, targets, pause=lambda: None):
    """Return backward(model, batch) for minibatches inputs[batch], with a pause before each."""

    def backward(model, batch):
        pause()
        x, rows = inputs[batch], len(inputs[batch])
        randomness = Randomness(0, batch, np.arange(rows))
        nn.cross_entropy(model(x, randomness), targets[batch]).backward()

    return backward


def deal(plan, size, count):
    """Return {worker: its minibatches}, as cards are dealt."""
    workers = range(plan.servers, size)
    return {w: list(range(w - plan.servers, count, len(workers))) for w in workers}


def calls_of(role, name):
    """Return a list that has one more entry after each call of the object's method."""
    calls, method = [], getattr(role, name)

    def call():
        method()
        calls.append(name)

    setattr(role, name, call)
    return calls


def session(group, plan, rule, model, data, count, naps=None, turns=None, device="cpu"):
    """Train on `count` minibatches; return what this rank has at the end.

    naps    {rank: seconds that each of its minibatches takes}
    turns   {rank: how often the others may go first, in each of its minibatches}
    device  where the weights are
    """

    def pause():
        time.sleep((naps or {}).get(group.rank, 0))
        for _ in range((turns or {}).get(group.rank, 0)):
            group.send(np.ones(1), to=group.rank)
            group.recv(group.rank)

    with threadpool_limits(1):
        role = join(group, model.to(device), OPTIMIZERS[rule], plan)
        pulls = [] if isinstance(role, Server) else calls_of(role, "pull")
        mine = deal(plan, group.size, count).get(group.rank, [])
        train(role, backward_on(*data, pause), mine)
    found = {"weights": model.state(), "bytes": role.group.ledger.bytes["send"]}
    if isinstance(role, Server):
        return found | {"log": role.log, "staleness": role.staleness()}
    return found | {"pulled": len(pulls), "pushed": role.pushed, "pending": role.pending}


def oracle(group, plan, rule, model, data, count, logs):
    """Return the weights that the logs lead to, on rank 0."""
    if group.rank == 0:
        batches = deal(plan, group.size, count)
        with threadpool_limits(1):
            return replay_server(model, plan, logs, batches, backward_on(*data), OPTIMIZERS[rule])


def run_and_replay(ranks, plan, rule="sgd", model=None, data=None, count=12, **more):
    """Return what the ranks found, the servers' logs, and the weights by the replay."""
    model = mlp() if model is None else model
    data = mlp_data(count) if data is None else data
    found = ranks.run(partial(session, **more), plan, rule, model, data, count)
    logs = [mine["log"] for mine in found[: plan.servers]]
    want = ranks.run(oracle, plan, rule, model, data, count, logs)[0]
    return found, logs, want


def violations(log, staleness, workers):
    """Return what breaks the bound: (worker, its clock, another worker, the updates it misses).

    A worker that computes with a version at clock c must have seen, of every other one, at least
    c - s gradients, or all there are.
    """
    broken, position = [], {}
    for update, pushes in enumerate(log):
        for push in pushes:
            position.setdefault(push.worker, []).extend([update] * len(push.batches))
    clocks = dict.fromkeys(workers, 0)
    for pushes in log:
        for push in pushes:
            for version in push.versions:
                for other in workers:
                    updates = position.get(other, [])
                    seen = sum(update < version for update in updates)
                    if seen < min(clocks[push.worker] - staleness, len(updates)):
                        broken.append((push.worker, clocks[push.worker], other, seen))
                clocks[push.worker] += 1
    return broken


def parameter_server_bytes(n, itemsize, servers, steps, n_fetch=1, n_push=1):
    """Return the bytes of dense pushes of n numbers and of pulls, of all ranks; without a quorum.

    16 per request and server, 16 per gradient in a push, 8 per pull and server for the version.

    steps  minibatches per worker, which pulls before every n_fetch-th and pushes after every
           n_push-th, from the first one on; its last message pushes what is left
    """
    pulls = sum(-(-count // n_fetch) for count in steps)
    pushes = sum(-(-count // n_push) for count in steps)
    rests = sum(count > 0 and (count - 1) % n_push > 0 for count in steps)
    heads = 16 * servers * (pulls + pushes + len(steps) + sum(steps))
    return heads + 8 * servers * pulls + itemsize * n * (pulls + pushes + rests)
