"""Parameter servers: the first ranks serve, the others compute."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, Worker, join, train
from minidist.errors import check_options
from minidist.nn.datasets import Batch, shard
from minidist.parallel.trainer import loss_of
from minidist.verify.replays.parameter_server import equal_to, everyones_logs, replay_server
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
