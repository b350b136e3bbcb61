"""Data parallelism as a Trainer: every rank has the whole model, and a share of every batch.

    trainer = DataParallel(model, group)
    optimizer = optim.AdamW(trainer.parameters(), lr=3e-4)
    loss = trainer.backward(Batch(inputs, targets))       # the whole batch, on every rank
    optimizer.clip_global_norm(1.0)
    trainer.step(optimizer)

The sum of the gradients is naive.py's. Batch norms and scales of eight bits are of the whole batch.
"""

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.datasets import Batch
from minidist.replicas import check_replicas, load_own, shapes_of, share_scales
from minidist.trainer import AnyOptimizer, WholeBatches, loss_of, update


class DataParallel:
    """A model that all ranks of a group have, with the same weights.

    check_weights  whether the ranks first compare their weights (see check_same_weights)
    sum_squares    None: every rank has the whole gradient
    """

    sum_squares = None

    def __init__(self, model: nn.Module, group: Group, check_weights: bool = True):
        self.model, self.group = sync_batch_norm(model, group), group
        share_scales(model.parameters(), group)
        self.check_group = check_replicas(model, group, check_weights, loads=True)
        self.batches = WholeBatches(model)

    @property
    def groups(self) -> list[Group]:
        return [self.group]

    def parameters(self) -> list[nn.Parameter]:
        return self.model.parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.model.named_parameters()

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in the model; return its loss."""
        loss = loss_of(self.model, batch.share(self.group.rank, self.group.size))
        self.accumulate(loss)
        return float(self.group.all_reduce(loss.data))

    def accumulate(self, loss: Tensor) -> None:
        """Compute the sum of the gradients of all ranks' losses, in the model."""
        with self.batches.batch():
            loss.backward()
            all_reduce_gradients(self.model, self.group)

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update the weights, on every rank in the same way; drop the gradients."""
        self.batches.check()
        update(optimizer, self.model)

    def state(self) -> dict[str, np.ndarray]:
        return self.model.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy arrays by name, the same on every rank, into the model."""
        load_own(self.model, state, shapes_of(self.model), self.check_group)
