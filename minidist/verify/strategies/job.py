"""A strategy at work on one rank: one description of it, which two observers run.

    outcomes.of_job  takes a batch; returns all gradients, and the bytes that were sent for them
    watched_step     takes a batch and an update of AdamW while a watch counts what that costs

A record's `start` is (group, case, **options) -> Job.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.nn.flat_parameters import FlatParameters
from minidist.optim import Optimizer
from minidist.pipeline_parallel.stage import Stage
from minidist.verify.strategies.cases import INPUT, Case, collect, of_kind
from minidist.verify.watch import Watch, adamw

Arrays = dict[str, np.ndarray]
Rule = Callable[[list[nn.Parameter]], Optimizer]
OnLoss = Callable[[Tensor], Tensor]
no_change: Rule = partial(optim.SGD, lr=0.0)


class Job:
    """This rank's part of a strategy that has a case to train; by default on one group.

    model      the layers that this rank runs
    groups     all that it communicates through, each with a ledger
    rule       the optimizer of a run that is certified; None: its result needs no update
    optimizer  of what this rank updates
    trains     whether backward also updates, as on a stream of minibatches
    """

    rule: Rule | None = None
    trains = False
    optimizer: Any

    def __init__(self, group: Group, case: Case, model: nn.Module):
        self.group, self.case, self.model = group, case, model
        self.groups: list[Group] = [group]

    def begin(self, rule: Rule) -> None:
        """Make the optimizer."""
        self.optimizer = rule(self.parameters())

    def let_watch(self, watch: Watch) -> None:
        """Let a watch record what enters the layers, from now on."""
        if stages := self.stages():
            watch.stages(stages, self.model)
        else:
            watch.model(of_kind(nn.Sequential, self.model))

    def stages(self) -> list[Stage]:
        """Return the stages that this rank holds, if it is one of a pipeline."""
        return []

    def backward(self, on_loss: OnLoss) -> None:
        """Compute the batch's gradient; or train on a whole stream of minibatches.

        on_loss  gets each loss before its backward, and returns it
        """
        raise NotImplementedError

    def result(self) -> Arrays:
        """Return on every rank all gradients, or all weights after a stream.

        What is sent for that is not counted.
        """
        return collect(self.model)

    def input_gradient(self, *pieces: Tensor | np.ndarray) -> Arrays:
        """Return the gradient of the whole input, if it is floats, from all ranks' pieces."""
        leaves = [x for x in pieces if isinstance(x, Tensor)]
        return {INPUT: self.group.all_gather(gradient_of(leaves))} if leaves else {}

    def step(self) -> None:
        """Update, if backward has not."""
        if not self.trains:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer updates."""
        return self.model.parameters()

    def sent(self) -> Counter[str]:
        """Return {operation: bytes that this rank has sent so far}."""
        return sum((group.ledger.bytes for group in self.groups), start=Counter())

    def kept(self) -> dict:
        """Return what is kept from step to step: arguments of `Watch.holds`."""
        homes = [p.home for p in self.parameters() if p.requires_grad]
        return {"homes": homes, "optimizer": self.optimizer}

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        """Return what the result should be, bit for bit, if that is not one device's gradient.

        Then also the cause in words where it is something else, if the cause is known.
        """
        return None, None


def gradient_of(pieces: Sequence[Tensor]) -> np.ndarray:
    """Return the gradient of several inputs in a row; zeros where there is none."""
    return np.concatenate([np.zeros_like(x.data) if x.grad is None else x.grad for x in pieces])


def by_name(flat: FlatParameters, vector: Array) -> Arrays:
    """Return {name: array} of a flat vector, laid out as a layer's parameters are."""
    views = zip(flat.parameters, flat.views(vector), strict=True)
    return {str(p.name): view for p, view in views}


def watched_step(start: Callable[..., Job], group: Group, case: Case, watch: Watch) -> None:
    """Take one step with AdamW, watched, on the ranks' device."""
    job = start(group, case.to(group.device), **case.options)
    job.begin(adamw)
    weights = [p.data for p in job.model.parameters()]
    job.let_watch(watch)
    job.backward(partial(watch.graph, parameters=weights))
    job.step()
    watch.sends(job.sent().total())
    watch.holds(**job.kept())
