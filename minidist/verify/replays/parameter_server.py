"""Reference of parameter servers: one rank replays a training from the servers' logs alone.

There are no messages and no races. Every slice does its updates in the order of its log. Every
worker's gradients are computed in the worker's order, each with the recorded versions, as soon as
these exist. At the end each slice must equal its server's, bit for bit, if the replay is run as a
rank, with the same share of the cores. A version is kept until the last worker has read it, and a
gradient until every slice has used it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Generator
from functools import reduce
from itertools import groupby, pairwise
from operator import add

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, Worker
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import FlatParameters
from minidist.pieces import split_ends

Work = Generator[list[int], np.ndarray, None]  # yields versions to pull; receives the weights
Reads = list[tuple[int, list[int]]]  # (minibatch, per slice its version), one per gradient


def everyones_logs(group: Group, role: Server | Worker) -> list[list[list[Push]]]:
    """Return the servers' logs, on every rank; they are sent as a row per gradient."""
    updates = role.log if isinstance(role, Server) else []
    rows = [
        (update, push.worker, batch, version)
        for update, pushes in enumerate(updates)
        for push in pushes
        for batch, version in zip(push.batches, push.versions, strict=True)
    ]
    counts = group.all_gather(np.array([len(rows)]))[: role.plan.servers]
    table = group.all_gather(np.array(rows, np.int64).reshape(-1, 4)).tolist()
    logs: list[list[list[Push]]] = []
    for stop, count in zip(np.cumsum(counts), counts, strict=True):
        log: list[list[Push]] = []
        for (update, worker), push in groupby(table[stop - count : stop], lambda row: row[:2]):
            if update == len(log):
                log.append([])
            _, _, batches, versions = zip(*push, strict=True)
            log[-1].append(Push(worker, batches, versions))
        logs.append(log)
    return logs


def replay_server(
    model: nn.Module,
    plan: ServerPlan,
    logs: list[list[list[Push]]],
    batches: dict[int, list[int]],
    backward: Callable[[nn.Module, int], None],
    optimizer: Callable,
    kept: slice = slice(None),
) -> dict[str, np.ndarray]:
    """Return the weights at the end, by name; the model does not change.

    logs     `Server.log` of every server
    batches  {worker: the minibatches that it was given}; ValueError if the logs do not have each of
             them exactly once, or if no order of events could give such logs
    kept     which minibatches of a push are in its sum: all, unless a worker forgets some
    """
    model = copy.deepcopy(model)
    flat = FlatParameters([p for p in model.parameters() if p.requires_grad])
    bounds = pairwise(split_ends(flat.size, len(logs)))
    reads = {w: reads_of(w, logs, dealt) for w, dealt in batches.items()}
    pulls = [versions for steps in reads.values() for _, versions in steps[:: plan.n_fetch]]
    slices = [
        Slice(flat.vector, part, log, optimizer, Counter(v[k] for v in pulls), kept)
        for k, (part, log) in enumerate(zip(bounds, logs, strict=True))
    ]
    workers = {w: _work(w, model, flat, plan, reads[w], backward, slices) for w in batches}
    wanted = {w: next(steps, None) for w, steps in workers.items()}
    moved = True
    while moved:
        moved = sum(s.update() for s in slices) > 0
        for w, versions in wanted.items():
            if versions and all(v <= s.done for v, s in zip(versions, slices, strict=True)):
                weights = [s.pull(v) for v, s in zip(versions, slices, strict=True)]
                wanted[w], moved = _send(workers[w], np.concatenate(weights)), True
    if any(wanted.values()) or any(s.done < len(s.log) for s in slices):
        raise WrongInput("no run can leave these logs: an update needs a version made after it")
    flat.vector[...] = np.concatenate([s.home.vector for s in slices])
    return model.state()


def reads_of(worker: int, logs: list[list[list[Push]]], dealt: list[int]) -> Reads:
    """Return a worker's minibatches and their versions; all servers must agree on them."""
    columns = []
    for log in logs:
        pushes = [push for update in log for push in update if push.worker == worker]
        batches = [batch for push in pushes for batch in push.batches]
        if batches != list(dealt):
            never = sorted(set(dealt) - set(batches))
            lost = f": the gradients of {never} were never applied" if never else ""
            raise WrongInput(
                f"worker {worker} was given {list(dealt)}, a server logged {batches}{lost}"
            )
        columns.append([version for push in pushes for version in push.versions])
    return [(batch, [column[n] for column in columns]) for n, batch in enumerate(dealt)]


def _work(w, model, flat, plan, reads: Reads, backward, slices) -> Work:
    """Yield the versions that worker w pulls, per slice; receive the weights; use them."""
    for step, (batch, versions) in enumerate(reads):
        if step % plan.n_fetch == 0:
            weights = yield versions
        flat.vector[...] = weights  # another worker's generator had the model meanwhile
        backward(model, batch)
        flat.collect_gradients()
        for s in slices:
            s.gradients[w, batch] = flat.gradient[s.part].copy()
        if plan.local_lr:
            weights = weights - plan.local_lr * flat.gradient
        for p in flat.parameters:
            p.grad = None


def _send(steps: Work, weights: np.ndarray):
    try:
        return steps.send(weights)
    except StopIteration:
        return None


class Slice:
    """One server's weights, replayed.

    pulls  {version: how many are still to come}
    gradients
           {(worker, minibatch): its gradient}, until it is used
    """

    def __init__(self, vector: np.ndarray, bounds, log, optimizer: Callable, pulls, kept: slice):
        self.part = slice(*bounds)
        self.parameter = nn.Parameter(vector[self.part].copy(), "slice")
        self.home = FlatParameters([self.parameter])
        self.optimizer, self.log, self.done = optimizer([self.parameter]), log, 0
        self.pulls, self.kept = pulls, kept
        self.gradients: dict[tuple[int, int], np.ndarray] = {}
        self.history = {0: self.home.vector.copy()}

    def pull(self, version: int) -> np.ndarray:
        """Return the weights of a version; forget them after the last pull."""
        if version < 0:  # there is none: the replay goes on with the newest, and ends elsewhere
            return self.home.vector.copy()
        self.pulls[version] -= 1
        return self.history[version] if self.pulls[version] else self.history.pop(version)

    def update(self) -> int:
        """Do the updates whose gradients are known by now; return how many."""
        before = self.done
        while self.done < len(self.log):
            keys = [[(push.worker, b) for b in push.batches] for push in self.log[self.done]]
            if any(key not in self.gradients for push in keys for key in push):
                break
            pushed = [[self.gradients.pop(key) for key in push] for push in keys]
            sums = [reduce(add, gradients[self.kept]) for gradients in pushed]
            self.parameter.grad = reduce(add, sums)
            self.optimizer.step()
            self.done += 1
            if self.pulls[self.done]:
                self.history[self.done] = self.home.vector.copy()
        return self.done - before


def equal_to(weights: dict[str, np.ndarray], others: dict[str, Callable[[], dict]]) -> str | None:
    """Return in words which other training gives these weights, bit for bit; None if none does.

    others  {what is different about that training: a function that replays it}
    """
    for difference, replay in others.items():
        try:
            again = replay()
        except (ValueError, KeyError, IndexError):  # nothing can have gone like this
            continue
        if all(np.array_equal(weights[name], w) for name, w in again.items()):
            return f"equals, bit for bit, a replay {difference}"
    return None
