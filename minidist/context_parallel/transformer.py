"""Context parallelism of a Transformer: every layer but attention works on each position alone.

Letters: N ranks, r this one.  A rank holds the whole model and T/N positions of every example.

    held = zigzag(T, N)[r]
    model = context_parallel(model, group)
    logits = model(columns(tokens, held), Randomness(seed, step, examples, positions=held))
    nn.cross_entropy(logits, columns(targets, held), reduction_size=nn.counted(targets)).backward()
    sum_gradients(model.parameters(), group)
    sum_loads(model, group)                # of experts, if their router has a bias

`positions` tells the embedding and dropout where the columns are in the sequence; `documents=`,
the numbers of whole sequences on every rank, tells attention where it stops; `counted=` and
`total=` tell experts which positions count. `reduction_size` divides the loss by all targets that
count, on all ranks; each rank's gradients are a sum over its positions, dW{+N}.
"""

from collections.abc import Callable, Iterable
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
from minidist.context_parallel.usp import Axes, usp
from minidist.errors import WrongInput, check_name
from minidist.pieces import Positions
from minidist.replicas import check_statistics, share_scales
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

    The lines to write around it are at the head of this file; the sums are in replicas/.

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
    products = {p.product for p in model.parameters() if p.product is not None}
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
    own = None if randomness is None else randomness.positions
    if own is None:
        own = Positions(((0, qkv.shape[3]),), qkv.shape[3])
    documents = None if randomness is None else randomness.document_runs(own.length)
    held = cut(own.length, group.size)
    if own.indices.tolist() != held[group.rank].indices.tolist():
        raise WrongInput(
            f"rank {group.rank} of {group.size} was given positions {own.runs} of {own.length}, "
            f"but its cut says {held[group.rank].runs}; cut tokens and targets by the same "
            "function, and pass Randomness(..., positions=)"
        )
    for how in products:
        how.check_part("positions", own.indices, own.length)
    return attention(qkv, group, held, documents)


def gather_choices(
    chosen: np.ndarray, randomness: Randomness | None, *, group: Group, cut: Cut
) -> np.ndarray:
    """Return the experts that all positions chose, chosen[B, T/N, k] -> [B, T, k].

    Every rank needs them, because the queue of an expert is in the order of positions.
    """
    pieces = group.all_gather(chosen, axis=1, label="chosen experts")
    held = cut(pieces.shape[1], group.size)
    order = np.concatenate([positions.indices for positions in held])
    return pieces[:, np.argsort(order)]
