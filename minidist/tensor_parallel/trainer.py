"""Tensor parallelism as a Trainer: every rank has a part of the matrices, and the whole batch.

    trainer = TensorParallel(model, group, split="matrices")
    loss = trainer.backward(Batch(inputs, targets))       # the whole batch, on every rank
    optimizer.clip_global_norm(1.0, trainer.sum_squares)
    trainer.step(optimizer)

    split        of                               what is cut
    "column"     a Sequential of Linear layers    each weight, by columns; Y is gathered
    "row"        a Sequential of Linear layers    each weight, by rows; X is cut
    "attention"  a Transformer or Seq2Seq         the heads alone
    "vocab"      a Transformer or Seq2Seq         embedding, logits, cross entropy
    "matrices"   a Transformer or Seq2Seq         both, and the feed-forward parts
    "sequence"   a Transformer                    all matrices; between them the sequence
    "channel"    a CNN                            the convolutions of each block

The gradient of a matrix is complete where its part is: nothing is summed after backward, but what
acts on a part of the sequence.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.backend import Array, to_host
from minidist.comm import Group
from minidist.errors import WrongInput, check_name
from minidist.nn.datasets import Batch
from minidist.parallel import check_same_weights, shapes_of
from minidist.parallel.trainer import Trainer
from minidist.tensor_parallel import vocab_parallel
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.parallel_attention import ParallelGroupedQueryAttention
from minidist.tensor_parallel.parallel_transformer import (
    ParallelTransformer,
    Parts,
    check_transformer,
    split_attention,
)
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tensor_parallel.vocab_parallel import split_head, split_tables
from minidist.tensor_parallel.whole import sum_squares, unsplit


class TensorParallel(Trainer):
    """This rank's part of a model whose matrices are split; every rank gets the whole batch.

    model          a single-device model, the same on every rank; its layers are taken over
    split          what is cut: see the table above
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(
        self, model: nn.Module, group: Group, split: str = "matrices", check_weights: bool = True
    ):
        check_name("split", split, SPLITS)
        if check_weights:
            check_same_weights(model, group)
        shapes, self.split = shapes_of(model), split
        part = SPLITS[split](model, group)
        part.loss = _loss(model, group) if split in CUT_VOCABULARY else model.loss
        super().__init__(part, group, shapes, group if check_weights else None)

    @property
    def groups(self) -> list[Group]:
        holders = {a.holders for a in self.model.modules(ParallelGroupedQueryAttention)}
        return [*super().groups, *filter(None, holders)]

    def share(self, batch: Batch) -> Batch:
        return batch  # all of it, on every rank

    def sum_gradients(self) -> None:
        if self.split == "sequence":
            all_reduce_partial(self.model, self.group)

    def total(self, loss: Array) -> float:
        return float(loss)

    def sum_squares(self, own: float | None = None) -> float:
        """Return the sum of the squares of the whole gradient: every parameter counts once."""
        return sum_squares(self.model, self.group, own)

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        named = self.named_parameters()
        return {name: to_host(unsplit(x, named[name], self.group)) for name, x in own.items()}


def by_layers(model: nn.Module, group: Group, layer: Callable) -> nn.Module:
    """Return a model of linear layers that are all split into such layers."""
    if not isinstance(model, nn.Sequential):
        raise WrongInput(f"cannot split the layers of {type(model).__name__}; use an nn.MLP")
    for linear in model.layers:
        if not isinstance(linear, nn.Linear):
            kind = type(linear).__name__
            raise WrongInput(f"cannot split a layer of the kind {kind}; use nn.Linear layers alone")
    return nn.Sequential([layer(linear, group=group) for linear in model.layers])


def by_heads(model: nn.Module, group: Group) -> nn.Module:
    """Split the attention heads of a Transformer or a Seq2Seq, in place; return it."""
    check_transformer(model)
    for block in model.layers[1:-1]:
        split_attention(block, group, Parts())
    return model.flatten()


def by_vocabulary(model: nn.Module, group: Group) -> nn.Module:
    """Return a model whose embedding and logits are split by vocabulary."""
    check_transformer(model)
    embedding, *blocks, head = model.layers
    split_tables(embedding, group)
    return nn.Sequential([embedding, *blocks, split_head(head, embedding, group)])


def _loss(model: nn.Module, group: Group) -> Callable:
    """Return the cross entropy over a vocabulary that is cut."""
    vocab_parallel.check_loss(model)
    assert isinstance(model, nn.Transformer | nn.Seq2Seq)
    return partial(vocab_parallel.cross_entropy, group=group, vocab=model.vocab)


SPLITS: dict[str, Callable[..., nn.Module]] = {
    "column": partial(by_layers, layer=partial(ColumnParallelLinear, gather_output=True)),
    "row": partial(by_layers, layer=partial(RowParallelLinear, scatter_input=True)),
    "attention": by_heads,
    "vocab": by_vocabulary,
    "matrices": partial(ParallelTransformer, check_weights=False),
    "sequence": partial(sequence_parallel, check_weights=False),
    "channel": partial(channel_parallel, check_weights=False),
}
CUT_VOCABULARY = "vocab", "matrices", "sequence"
