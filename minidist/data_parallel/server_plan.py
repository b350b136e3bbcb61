"""What parameter servers and their workers agree on: the plan, the slices, and how they talk.

Read `parameter_server.py` first.
"""

from dataclasses import dataclass
from functools import partial
from numbers import Integral
from operator import le

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.sparse_update import Blocks
from minidist.errors import WrongInput, check_number
from minidist.nn.flat_parameters import FlatParameters
from minidist.pieces import split_ends
from minidist.replicas import check_same_weights, check_statistics

PULL, PUSH, FINISH = range(3)
HEAD, BODY = range(2)  # tags: what a message is about, and its payload


@dataclass(frozen=True)
class ServerPlan:
    """How ranks share the work; the same on all of them.

    servers         number of servers: the first ranks, each with a slice; the others are workers
    staleness       how many clocks a worker may be ahead of the slowest one (0: none; None: any
                    number); with a quorum, how many updates in a row a worker may miss
    quorum          how many workers suffice for an update (None: all if staleness is 0, else one)
    n_fetch, n_push minibatches from one pull to the next, and from one push to the next
    local_lr        learning rate with which a worker updates its own copy between pulls
    sparse          push only rows that are not zero; for optimizers that leave the others alone
    check_weights   whether the ranks first compare their weights (see check_same_weights)
    """

    servers: int = 1
    staleness: int | None = 0
    quorum: int | None = None
    n_fetch: int = 1
    n_push: int = 1
    local_lr: float = 0.0
    sparse: bool = False
    check_weights: bool = True

    def __post_init__(self):
        counts = {"servers": 1, "n_fetch": 1, "n_push": 1}
        counts |= {} if self.quorum is None else {"quorum": 1}
        counts |= {} if self.staleness is None else {"staleness": 0}
        for name, low in counts.items():
            words, allows = f"{name} is a whole number from {low}", partial(le, low)
            check_number(words, getattr(self, name), allows, Integral)
        free = self.staleness is None and self.quorum is None
        if not free and (self.n_fetch, self.n_push, self.local_lr) != (1, 1, 0):
            raise WrongInput(
                "n_fetch, n_push and local_lr are Downpour's: use staleness=None without a quorum; "
                "under any other plan a worker pulls and pushes at every clock"
            )

    def workers(self, ranks: int) -> int:
        """Return how many ranks work; ValueError if none does, or fewer than a quorum."""
        if ranks <= self.servers:
            raise WrongInput(
                f"{self.servers} servers on {ranks} ranks leave no worker; "
                f"use {self.servers + 1} ranks or more, or fewer servers"
            )
        workers = ranks - self.servers
        if self.quorum is not None and self.quorum > workers:
            raise WrongInput(
                f"quorum={self.quorum} of {workers} workers is never reached; use {workers} or "
                f"fewer, or {self.servers + self.quorum} ranks or more"
            )
        return workers


def check_fixed_statistics(model: nn.Module) -> None:
    """Raise ValueError if a BatchNorm trains: its worker would move what no server has."""
    for norm in model.modules(nn.BatchNorm):
        if norm.training:
            raise WrongInput(
                f"{norm.name} moves its running statistics on the worker that uses them, and no "
                "server has them; use model.eval() to train with fixed ones, or average gradients "
                "(data_parallel/naive.py)"
            )


class Member:
    """What servers and workers have in common: the model as one flat vector, and their group."""

    def __init__(self, group: Group, model: nn.Module, plan: ServerPlan):
        workers = plan.workers(group.size)  # raises if none does
        check_fixed_statistics(model)
        check_statistics(model, workers)
        self.flat = FlatParameters([p for p in model.parameters() if p.requires_grad])
        if plan.check_weights:
            check_same_weights(model, group)
        self.group, self.model, self.plan = group.split(0), model, plan
        self.group.all_gather(np.zeros(0), label=str(plan))  # one plan everywhere, or an error
        ends = split_ends(self.flat.size, plan.servers)
        self.slices = [slice(*ends[k : k + 2]) for k in range(plan.servers)]
        self.blocks = [Blocks(self.flat, s.start, s.stop) for s in self.slices if plan.sparse]

    def gather(self) -> None:
        """Write the servers' weights into every rank's model."""
        own = [*self.slices, slice(0, 0)][min(self.group.rank, self.plan.servers)]
        self.flat.vector[...] = self.group.all_gather(self.flat.vector[own])
        self.flat.changed()
        for p in self.flat.parameters:
            p.elsewhere = None
