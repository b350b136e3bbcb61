"""Parameter servers: the first ranks serve, the others compute; one rank replays a training.

The replay needs the servers' logs alone; it has no messages and no races. Every slice does its
updates in the order of its log. Every worker's gradients are computed in the worker's order, each
with the recorded versions, as soon as these exist. At the end each slice must equal its server's,
bit for bit, if the replay is run as a rank, with the same share of the cores. A version is kept
until the last worker has read it, and a gradient until every slice has used it.
"""

import copy
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial, reduce
from itertools import groupby, pairwise
from operator import add

import numpy as np

from minidist import nn, optim
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, Worker, join, train
from minidist.errors import WrongInput, check_options
from minidist.nn.datasets import Batch, shard
from minidist.nn.flat_parameters import FlatParameters
from minidist.parallel.trainer import loss_of
from minidist.pieces import split_ends
from minidist.verify.strategies.cases import (
    Case,
    collect,
    servers_among,
    stream_cases,
    transformer_example,
)
from minidist.verify.strategies.job import Arrays, Job, Rule, by_name, momentum
from minidist.verify.strategies.record import record


class TwiceSGD(optim.SGD):
    """Takes every step twice: a mistake, with which a replay is compared."""

    def step(self, copies=None, factor=1.0) -> None:
        super().step(copies, factor)
        super().step(copies, factor)


twice = partial(TwiceSGD, lr=0.1, momentum=0.9)


class Served(Job):
    """This rank's role under a plan: the first ranks serve, the others compute.

    dealt    {worker: the numbers of its minibatches}
    batches  those minibatches that this rank computes, and in a replay all
    """

    trains = True  # the servers have updated
    role: Server | Worker

    def __init__(self, group: Group, case: Case, plan: ServerPlan, dealt: dict[int, list[int]]):
        super().__init__(group, case, copy.deepcopy(case.model))
        self.plan, self.dealt = plan, dealt
        self.batches: list[Batch] = []

    def begin(self, rule: Rule) -> None:
        self.role = join(self.group, self.model, rule, self.plan)

    def again(self, model: nn.Module, batch: int) -> None:
        """Compute the gradient of one minibatch, also in a replay."""
        loss = loss_of(model, self.batches[batch])
        self.losses.append(loss.item())
        loss.backward()

    def backward(self) -> None:
        train(self.role, self.again, self.dealt.get(self.group.rank, []))

    def sent(self) -> Counter[str]:
        """Return the bytes between servers and workers, without the last gather of weights."""
        return Counter(send=self.role.group.ledger.bytes["send"])

    def kept(self) -> dict:
        if isinstance(self.role, Server):
            homes = [self.role.flat, self.role.slice.home]
            return {"homes": homes, "optimizer": self.role.optimizer}
        return {"homes": [self.role.flat], "gradients": [self.role.buffer]}


class OneClock(Served):
    """Each worker pushes the gradient of its examples at version 0; the servers have the sum.

    shares  {worker: its examples}
    """

    def __init__(self, group: Group, case: Case, plan: ServerPlan, shares: dict[int, np.ndarray]):
        super().__init__(group, case, plan, {worker: [0] for worker in shares})
        self.batches = [self.batch.rows(shares.get(group.rank, np.arange(0)))]

    def result(self) -> Arrays:
        role, frozen = self.role, collect(self.model)  # whose zeros, and statistics, are used
        slices = role.slice.grad if isinstance(role, Server) else role.buffer[:0]
        trained = by_name(role.flat, self.group.all_gather(slices))
        return frozen | trained | self.input_gradient()


class ServedStream(Served):
    """A stream of minibatches, dealt to the workers in turn; the result is the weights."""

    rule: Rule = staticmethod(momentum)

    def __init__(self, group: Group, case: Case, plan: ServerPlan, minibatches: int):
        super().__init__(group, case, plan, _deal(minibatches, group.size))
        self.batches = case.minibatches(minibatches)

    def result(self) -> Arrays:
        return self.model.state()

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        logs = everyones_logs(self.group, self.role)
        if self.group.rank:
            return None, None
        want = self.replay(logs)
        if all(np.array_equal(result[name], w) for name, w in want.items()):
            return want, None
        return want, equal_to(result, self.wrong_replays(logs))

    def replay(self, logs: list, backward=None, optimizer=momentum, **options) -> Arrays:
        backward = backward or self.again
        return replay_server(
            self.case.model, self.plan, logs, self.dealt, backward, optimizer, **options
        )

    def wrong_replays(self, logs: list) -> dict[str, Callable[[], Arrays]]:
        """Return {what is different about it: a replay that is not the one that should be}."""
        return {
            "with versions -1 of those recorded": partial(self.replay, _shifted(logs, -1)),
            "with versions +1 of those recorded": partial(self.replay, _shifted(logs, 1)),
            "that updates twice": partial(self.replay, logs, optimizer=twice),
            "in which a push has all that its worker has sent": lambda: self.replay(
                logs, backward=self.with_all_before()
            ),
            "in which a push has its last gradient alone: a buffer that forgets": partial(
                self.replay, logs, kept=slice(-1, None)
            ),
        }

    def with_all_before(self) -> Callable[[nn.Module, int], None]:
        """Return a backward that adds what the minibatch's worker has computed so far."""
        owner = {batch: w for w, mine in self.dealt.items() for batch in mine}
        sums: dict[tuple, np.ndarray] = {}

        def accumulate(model: nn.Module, batch: int) -> None:
            self.again(model, batch)
            for p in model.parameters():
                if p.grad is not None:
                    key = owner[batch], p.name
                    sums[key] = p.grad = p.grad + sums.get(key, 0)

        return accumulate


def synchronous(group: Group, case: Case, servers: int | None = None) -> OneClock:
    """Start one clock of synchronous servers; every worker has a share of the batch."""
    servers = servers or servers_among(group.size)
    examples, workers = np.arange(len(case.inputs)), range(servers, group.size)
    shares = {w: shard(examples, w - servers, len(workers)) for w in workers}
    return OneClock(group, case, ServerPlan(servers), shares)


def stale(
    group: Group, case: Case, plan: ServerPlan, minibatches: int | None = None, **options
) -> Served:
    """Start a stream of minibatches; by default one minibatch, on the first worker."""
    servers = servers_among(group.size)
    check_options(ServerPlan, options, "a plan", without=["servers"])
    plan = replace(plan, servers=servers, **options)
    if not minibatches:
        return OneClock(group, case, plan, {servers: np.arange(len(case.inputs))})
    return ServedStream(group, case, plan, minibatches)


def _shifted(logs: list, by: int) -> list:
    def moved(push: Push) -> Push:
        return replace(push, versions=tuple(v + by for v in push.versions))

    return [[[moved(push) for push in update] for update in log] for log in logs]


def _workers(ranks: int) -> range:
    return range(servers_among(ranks), ranks)


def _deal(minibatches: int, ranks: int) -> dict[int, list[int]]:
    """Return {worker: its minibatches}, dealt in turn."""
    workers = _workers(ranks)
    return {w: list(range(k, minibatches, len(workers))) for k, w in enumerate(workers)}


def downpour_cases(ranks: int) -> list[Case]:
    """Streams, one minibatch, and a stream with rare pulls and pushes and local steps."""
    cases = stream_cases(ranks)
    rare = {"minibatches": 11, "n_fetch": 2, "n_push": 3, "local_lr": 0.05}
    return [*cases, replace(cases[0], name="MLP, n_fetch 2, n_push 3", options=rare)]


def stream_example(ranks: int) -> Case:
    """Return the example with a minibatch for each worker."""
    return transformer_example(ranks, minibatches=len(_workers(ranks)))


# The replay.

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


STRATEGIES = [
    record("parameter_server", start=synchronous),
    record(
        "downpour",
        start=partial(stale, plan=ServerPlan(staleness=None)),
        cases=downpour_cases,
        example=stream_example,
    ),
    record(
        "ssp",
        start=partial(stale, plan=ServerPlan(staleness=1)),
        cases=stream_cases,
        example=stream_example,
    ),
]
