"""What strategies share that train on a stream of minibatches and are replayed on one device."""

import copy
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.verify.replays.data_parallel import Training
from minidist.verify.strategies.cases import Case
from minidist.verify.strategies.job import Arrays, Job, OnLoss


class TwiceSGD(optim.SGD):
    """Takes every step twice: a mistake, with which a replay is compared."""

    def step(self, copies=None, factor=1.0) -> None:
        super().step(copies, factor)
        super().step(copies, factor)


momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
twice = partial(TwiceSGD, lr=0.1, momentum=0.9)


class Stream(Job):
    """Replicas that train on their shares of each minibatch; the result is the weights."""

    trains = True

    def __init__(self, group: Group, case: Case, minibatches: int):
        super().__init__(group, case, copy.deepcopy(case.model))
        self.cut = np.array_split(np.arange(len(case.inputs)), minibatches)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """Return the loss of a rank's share of a minibatch."""
        case, rows = self.case, self.cut[step]
        batch = Batch(case.inputs[rows], case.targets[rows], case.seed, step, rows)
        mine = batch.share(rank, self.group.size)
        y = model(mine.inputs, mine.randomness)
        return case.loss(y, mine.targets, reduction_size=mine.total)

    def again(self, model: nn.Module, step: int, rank: int) -> None:
        """Add the gradient of a rank's share of a minibatch to the model's, in a replay."""
        self.loss(model, step, rank).backward()

    def backward(self, on_loss: OnLoss) -> None:
        for step in range(len(self.cut)):
            on_loss(self.loss(self.model, step, self.group.rank)).backward()
            self.update()

    def update(self) -> None:
        """Do after a minibatch what the strategy does."""
        raise NotImplementedError

    def result(self) -> Arrays:
        return self.model.state()

    @property
    def training(self) -> Training:
        """What a replay repeats."""
        return Training(self.case.model, len(self.cut), self.group.size, self.again)

    def replay(self) -> Arrays:
        """Return the weights of the same training, repeated by one device."""
        raise NotImplementedError

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        return None if self.group.rank else self.replay(), None
