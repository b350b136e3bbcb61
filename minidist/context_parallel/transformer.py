"""Context parallelism of a Transformer: every layer but attention works on each position alone.

Letters: N ranks, r this one.  A rank holds the whole model and T/N positions of every example.

    trainer = ContextParallel(model, group, attention="ring")
    loss = trainer.backward(Batch(tokens, targets))       # whole sequences, on every rank

Each rank computes on its columns: `positions` tells the embedding and dropout where these are in
the sequence; the numbers of documents, of whole sequences, tell attention where it stops; which
positions count, and how many, is told to experts. All ranks divide the loss by all targets that
count, so each rank's gradients are a sum over its positions, dW{+N}.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.autograd.eight_bits import EightBits
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.context_parallel.cuts import Cut, zigzag
from minidist.context_parallel.gathered_attention import gathered_attention
from minidist.context_parallel.ring_attention import ring_attention
from minidist.context_parallel.ulysses import ulysses
from minidist.context_parallel.usp import Axes, axes_of, usp
from minidist.errors import WrongInput, check_name
from minidist.nn.datasets import Batch
from minidist.parallel import (
    check_replicas,
    check_statistics,
    share_scales,
    sum_gradients,
    sum_loads,
)
from minidist.parallel.trainer import Trainer
from minidist.pieces import Positions
from minidist.rng import Randomness

ATTENTION = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses}


def context_parallel(
    model: nn.Sequential,
    group: Group,
    attention: str = "ring",
    cut: Cut = zigzag,
    axes: Axes | None = None,
) -> nn.Sequential:
    """Make the blocks of a Transformer attend over sequences cut over the group; return it.

    ContextParallel trains with it: its `share` and its sums are what is to be written around it.

    model      an nn.Transformer, or a tensor_parallel.ParallelTransformer; changed in place
    attention  "ring", "gathered" or "ulysses"
    cut        (T, N) -> the positions of each rank; the tokens must be cut by the same
    axes       of the group, see usp.py: neighbours exchange heads, the others attend by `attention`
    """
    check_name("attention", attention, ATTENTION)
    over = ATTENTION[attention]
    if axes is not None:
        if attention == "ulysses":
            raise WrongInput(
                "heads are exchanged inside a ring already; use attention='ring' or 'gathered'"
            )
        over = partial(usp, axes=axes, attention=over)
    share_scales(model.parameters(), group)
    check_statistics(model, group.size, loads=True)
    products = {bits for p in model.parameters() if (bits := p.format.product)}
    attend = partial(attend_over, group=group, attention=over, cut=cut, products=products)
    if pairs := [x for x in model.layers if isinstance(x, nn.EncoderBlock | nn.DecoderBlock)]:
        raise WrongInput(
            f"context parallelism cuts one sequence, and an nn.Seq2Seq has a source of "
            f"{pairs[0].split} positions and a target; leave both whole (cp=1), and split the "
            "batch, the layers or the matrices"
        )
    blocks = [layer for layer in model.layers if hasattr(layer, "attention")]
    if not blocks:
        raise WrongInput(
            f"no layer of this {type(model).__name__} attends to other positions; "
            "use an nn.Transformer"
        )
    for block in blocks:
        block.attention.attend = attend
    for mixture in nn.mixtures(model):
        mixture.gather_choices = partial(gather_choices, group=group, cut=cut)
    return model


class ContextParallel(Trainer):
    """The whole model, on this rank's positions of every example.

    model          a single-device Transformer, the same on every rank; changed in place
    attention, cut see `context_parallel`
    ulysses        how many neighbours exchange heads inside a ring (usp.py)
    check_weights  whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(
        self,
        model: nn.Sequential,
        group: Group,
        attention: str = "ring",
        cut: Cut = zigzag,
        ulysses: int = 1,
        check_weights: bool = True,
    ):
        self.axes, self.cut = axes_of(group, ulysses) if ulysses != 1 else None, cut
        split = context_parallel(model, group, attention, cut, self.axes)
        same = check_replicas(split, group, check_weights, loads=True)
        super().__init__(split, group, check_group=same)

    @property
    def groups(self) -> list[Group]:
        return [*super().groups, *(self.axes or ())]

    def share(self, batch: Batch) -> Batch:
        return share_of_positions(batch, self.group, self.cut)

    def sum_gradients(self) -> None:
        sum_gradients(self.model.parameters(), self.group)
        sum_loads(self.model, self.group)


def share_of_positions(batch: Batch, group: Group, cut: Cut) -> Batch:
    """Return this rank's positions of every example of a batch."""
    held = cut(batch.inputs.shape[1], group.size)[group.rank]
    if held.whole:
        return batch
    x, y = columns(batch.inputs, held), columns(batch.targets, held)
    return replace(batch, inputs=x, targets=y, positions=held)


def columns(x: Array, held: Positions) -> Array:
    """Return the columns of X[B, T, ...] at these positions, for example tokens or targets."""
    return array_module(x).concatenate([x[:, a:b] for a, b in held.runs], axis=1)


def attend_over(
    qkv: Tensor,
    randomness: Randomness | None,
    *,
    group: Group,
    attention: Callable,
    cut: Cut,
    products: Iterable[EightBits] = (),
) -> Tensor:
    """Attend over the whole sequence from this rank's part: QKV[G + 2, B, K, T/N, D] -> O.

    products  of the model's layers, whose strips of positions must be whole
    """
    here = None if randomness is None else randomness.positions
    if here is None:
        here = Positions(((0, qkv.shape[3]),), qkv.shape[3])
    documents = None if randomness is None else randomness.document_runs(here.length)
    held = cut(here.length, group.size)
    if here.indices.tolist() != held[group.rank].indices.tolist():
        raise WrongInput(
            f"rank {group.rank} of {group.size} was given positions {here.runs} of {here.length}, "
            f"but its cut says {held[group.rank].runs}; cut tokens and targets by the same "
            "function, and pass Randomness(..., positions=)"
        )
    for bits in products:
        bits.check_part("positions", here.indices, here.length)
    return attention(qkv, group, held, documents)


def gather_choices(
    chosen: np.ndarray, randomness: Randomness | None, *, group: Group, cut: Cut
) -> np.ndarray:
    """Return the experts that all positions chose, chosen[B, T/N, k] -> [B, T, k]."""
    # Every rank needs them all, because the queue of an expert is in the order of positions.
    pieces = group.all_gather(chosen, axis=1, label="chosen experts")
    held = cut(pieces.shape[1], group.size)
    order = np.concatenate([positions.indices for positions in held])
    return pieces[:, np.argsort(order)]
