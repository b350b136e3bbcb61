"""Data parallelism as a Trainer: every rank has the whole model, and a share of every batch.

    trainer = DataParallel(model, group)
    optimizer = optim.AdamW(trainer.parameters(), lr=3e-4)
    loss = trainer.backward(Batch(inputs, targets))       # the whole batch, on every rank
    optimizer.clip_global_norm(1.0)
    trainer.step(optimizer)

The sum of the gradients is naive.py's, or bucketed.py's, beside backward. Batch norms and scales of
eight bits are of the whole batch.
"""

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.compression import Compressor, ErrorFeedback
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.parallel import check_replicas, share_scales
from minidist.parallel.trainer import Trainer


class DataParallel(Trainer):
    """A model that all ranks of a group have, with the same weights.

    check_weights  whether the ranks first compare their weights (see check_same_weights)
    micro_batches  of each rank's share of a batch; their gradients are added up, then summed
    sum_squares    None: every rank has the whole gradient
    """

    def __init__(
        self, model: nn.Module, group: Group, check_weights: bool = True, micro_batches: int = 1
    ):
        sync_batch_norm(model, group)
        share_scales(model.parameters(), group)
        same = check_replicas(model, group, check_weights, loads=True, micro_batches=micro_batches)
        super().__init__(model, group, check_group=same, micro_batches=micro_batches)

    def sum_gradients(self) -> None:
        all_reduce_gradients(self.model, self.group)


class BucketedDataParallel(DataParallel):
    """DataParallel whose sums run in buckets of `cap` bytes, during the last backward."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        check_weights: bool = True,
        micro_batches: int = 1,
        cap: int = 1 << 20,
    ):
        super().__init__(model, group, check_weights, micro_batches)
        self.reducer = Bucketed(model, group, cap, check_weights=False)

    @property
    def groups(self) -> list[Group]:
        return [self.reducer.group, self.loss_group]

    def accumulate(self, loss: Tensor, last: bool = True) -> None:
        """Add the gradient of a micro-batch's loss; sum while the last one's is computed."""
        if not last:
            return loss.backward()
        with self.reducer.reduce():
            loss.backward()

    def drop(self) -> None:
        super().drop()
        self.reducer.drop()


class CompressedDataParallel(DataParallel):
    """DataParallel that sends less: each rank remembers what it leaves out (compression.py).

    compress  what is sent of a gradient (compression.py, power_sgd.py)
    """

    def __init__(
        self, model: nn.Module, group: Group, compress: Compressor, check_weights: bool = True
    ):
        super().__init__(model, group, check_weights)
        self.feedback = ErrorFeedback(model, group, compress)

    def sum_gradients(self) -> None:
        self.feedback.all_reduce_gradients()
