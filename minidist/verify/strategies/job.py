"""A strategy at work on one rank: one description of it, which two observers run.

    outcomes.of_job  takes a batch; returns all gradients, and the bytes that were sent for them
    watched_step     takes a batch and an update of AdamW while a watch counts what that costs

`AtWork` runs any Trainer. What is no Trainer, servers and a PipeDream, has a Job of its own.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.nn.datasets import Batch
from minidist.nn.flat_parameters import FlatParameters
from minidist.nn.optim import Optimizer
from minidist.parallel.trainer import Trainer
from minidist.pipeline_parallel.stage import Stage
from minidist.tensor_parallel import TensorParallel
from minidist.verify.strategies.cases import INPUT, Case, as_input, moved_by_forward
from minidist.verify.watch import Watch, adamw

Arrays = dict[str, np.ndarray]
Rule = Callable[[list[nn.Parameter]], Optimizer]
no_change: Rule = partial(optim.SGD, lr=0.0)
momentum: Rule = partial(optim.SGD, lr=0.1, momentum=0.9)


class Job:
    """This rank's part of a strategy that has a case to train; by default on one group.

    model      the layers that this rank runs
    groups     all that it communicates through, each with a ledger whose bytes count
    stages     those that this rank holds, if it is one of a pipeline
    rule       the optimizer of a run that is certified
    optimizer  of what this rank updates
    losses     of the batches so far
    batch      the case's; floating inputs are a leaf, whose gradient is compared
    trains     whether backward also updates, as on a stream of minibatches
    has_all_inputs
               whether each rank has the gradient of all inputs, not a part of a sum
    """

    rule: Rule = staticmethod(no_change)
    trains = False
    has_all_inputs = False
    stages: Sequence[Stage] = ()
    optimizer: Any

    def __init__(self, group: Group, case: Case, model: nn.Module):
        self.group, self.case, self.model = group, case, model
        self.groups: list[Group] = [group]
        self.losses: list[float] = []
        self.batch = replace(case.batch, inputs=as_input(case.inputs))

    def begin(self, rule: Rule) -> None:
        """Make the optimizer."""
        self.optimizer = rule(self.parameters())

    def let_watch(self, watch: Watch) -> None:
        """Let a watch record what enters the layers, and each loss, from now on."""
        if self.stages:
            watch.stages([*self.stages], self.model)
        else:
            watch.model(self.model)

    def backward(self) -> None:
        """Compute the batch's gradient; or train on a whole stream of minibatches."""
        raise NotImplementedError

    def result(self) -> Arrays:
        """Return on every rank all gradients, or all weights after a stream.

        What is sent for that is not counted.
        """
        raise NotImplementedError

    def input_gradient(self) -> Arrays:
        """Return the gradient of the whole input, if it is floats, from what all ranks have."""
        x = self.batch.inputs
        if not isinstance(x, Tensor):
            return {}
        part = x.xp.zeros_like(x.data) if x.grad is None else x.grad
        return {INPUT: part if self.has_all_inputs else self.group.all_reduce(part)}

    def step(self) -> None:
        """Update, if backward has not."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates."""
        return self.model.parameters()

    def sent(self) -> Counter[str]:
        """Return {operation: bytes that this rank has sent so far}."""
        return sum((group.ledger.bytes for group in self.groups), start=Counter())

    def kept(self) -> dict:
        """Return the arguments of `Watch.holds`: all that is kept from step to step."""
        homes = [p.home for p in self.parameters() if p.requires_grad]
        return {"homes": homes, "optimizer": self.optimizer}

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        """Return the right result, if that is not one device's gradient, and a cause in words.

        The cause of a result that is another one, if it is known.
        """
        return None, None


class AtWork(Job):
    """A Trainer at work: on the case's one batch, or on batches in a row, with a step after each.

    make     (model, group, **options) -> the Trainer; it takes the model over
    batches  of the steps, after which the result is the weights; if there are none, the gradient of
             the case's batch
    replay   () -> the weights after these steps, as one device computes them
    rule     the optimizer
    trainer  the Trainer; its loss is summed in a group whose bytes do not count
    """

    def __init__(
        self,
        group: Group,
        case: Case,
        make: Callable[..., Trainer],
        batches: Sequence[Batch] = (),
        replay: Callable[[], Arrays] | None = None,
        rule: Rule = no_change,
        **options,
    ):
        model = copy.deepcopy(case.model) if replay else case.model  # a replay begins with it
        self.trainer = make(model.flatten(group.empty), group, **options)
        self.pipeline: Any = getattr(self.trainer, "pipeline", self.trainer)  # a Hybrid has one
        super().__init__(group, case, self.pipeline.model)
        self.batches, self.replay, self.rule = batches, replay, rule
        self.trains = bool(batches)
        self.stages = getattr(self.pipeline, "stages", ())
        self.has_all_inputs = isinstance(self.trainer, TensorParallel)
        apart = getattr(self.trainer, "loss_group", None)
        self.groups = [of for of in self.trainer.groups if of is not apart]

    def parameters(self) -> list[nn.Parameter]:
        return self.trainer.parameters()

    def backward(self) -> None:
        for batch in self.batches or [self.batch]:
            batch = replace(batch, loss_scale=self.optimizer.loss_scale)
            self.losses.append(self.trainer.backward(batch))
            if self.trains:
                self.trainer.step(self.optimizer)

    def step(self) -> None:
        if not self.trains:
            self.trainer.step(self.optimizer)

    def result(self) -> Arrays:
        if self.trains:
            return self.trainer.state()
        moved = self.trainer.whole(moved_by_forward(self.model))
        return self.trainer.gradients() | moved | self.input_gradient()

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        return self.replay() if self.trains and self.replay and self.group.rank == 0 else None, None

    def kept(self) -> dict:
        parameters = chain(self.trainer.named_parameters().values(), self.parameters())
        homes = [p.home for p in parameters if p.home is not None]
        kept = {"homes": homes, "optimizer": self.optimizer}
        buffers = getattr(getattr(self.trainer, "copies", None), "buffers", ())
        if buffers:  # ZeRO's, whole or cut
            kept |= {"gradients": buffers[:1], "parameters": buffers[1:]}
        return kept


def by_name(flat: FlatParameters, vector: Array) -> Arrays:
    """Return {name: array} of a flat vector, laid out as a layer's parameters are."""
    views = zip(flat.parameters, flat.views(vector), strict=True)
    return {str(p.name): view for p, view in views}


def watched_step(start: Callable[..., Job], group: Group, case: Case, watch: Watch) -> None:
    """Take one step with AdamW, watched, on the ranks' device."""
    job = start(group, case.to(group.device), **case.options)
    job.begin(adamw)
    job.let_watch(watch)
    job.backward()
    job.step()
    watch.sent = job.sent().total()
    watch.holds(**job.kept())
