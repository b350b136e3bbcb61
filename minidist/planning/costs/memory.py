"""Bytes that each rank of a plan holds: parameters, gradients, optimizer state, activations.

ZeRO cuts them over the N ranks of dp x cp: zero.py has the table. keeps="minidist" adds the buffers
that our ZeRO has; the papers count none.

What a layer's forward pass keeps for backward, of one micro-batch, is counted by two conventions,
each a function (size, plan, b) -> Kept, for b examples on one rank:

    keeps="minidist"     what our blocks keep: `block_keeps`, measured on real blocks
    keeps="korthikanti"  Korthikanti et al., Reducing Activation Recomputation in Large Transformer
                         Models (2022), section 4 and table 2: with dropout, 2 bytes a number,
                         standard attention

Recomputation, on a block of b T positions with X = b T C:

                    minidist                                 korthikanti (table 2)
    selective       T numbers of a head in place of T T      without 5 H b T T
    full            the block's input X; one block's         2 X
                    activations while it runs again

At 2 bytes a number we also keep gelu's factor, 8 X, and the norms' r, 4 b T. We do not drop out
probabilities, which would take a mask and a dropped-out copy, 3 b H T T; and of the probabilities
themselves, 2 b H T T, we keep `kept_scores(T)` in place of T T. Where they keep a norm's input, we
keep n, of equal size.

Over cp (ring attention) a rank has T/cp positions, and keeps no T T either.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pieces import in_one_piece
from minidist.planning.costs.stages import (
    Entry,
    Parameters,
    check_split,
    in_flight_on,
    layer_parameters,
    peak_of,
    stages_of,
)
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_elements
from minidist.planning.plans.plan import Plan, check_one_of


class Kept(NamedTuple):
    """Bytes of one micro-batch on a rank.

    embedding, block, head         from forward to backward
    deferred_block, deferred_end   by which a block, and each of embedding and head, may hold more
                                   between I and W: an upper bound
    once                           of one block while it runs again, for any number of micro-batches
    """

    embedding: int
    block: int
    head: int
    deferred_block: int = 0
    deferred_end: int = 0
    once: int = 0


class BlockBytes(NamedTuple):
    """Bytes that a block's forward leaves for its backward."""

    outside: int
    attention: int
    feed_forward: int


def memory(
    size: TransformerSize,
    plan: Plan,
    batch: int,
    rank: int = 0,
    keeps: str = "minidist",
    per_parameter: int = 16,
    points: Iterable[Entry] | None = None,
) -> dict[str, int]:
    """Return {"parameters", "gradients", "optimizer", "activations": bytes} of one rank.

    batch          examples of a step, over all ranks
    rank           0 to pp - 1, of the pipeline; on the other axes, the rank that holds most
    keeps          what a layer keeps for backward: "minidist" or "korthikanti" (see `CONVENTIONS`)
    per_parameter  bytes with Adam: 16, or 18 where mixed precision sums gradients in float32
    points         what it has in flight, as entries of `in_flight`; None: what the plan says

    Activations are the peak at the end of a forward pass. Not in here: what a layer needs only
    while it runs, buffers of messages, and the allocator's losses.
    """
    check_one_of("keeps", keeps, CONVENTIONS)
    if (plan.precision, per_parameter) not in BYTES:
        raise WrongInput(f"no count of {per_parameter} bytes per parameter for {plan.precision}")
    check_split(size, plan)
    b = micro_batch(plan, batch)
    kept = CONVENTIONS[keeps](size, plan, b)
    layers = layer_parameters(size, plan, rank)
    states = elements_of(layers, plan, buffers=keeps == "minidist")
    each = BYTES[plan.precision, per_parameter]
    kinds = "parameters", "gradients", "optimizer"
    held = {kind: n * width for kind, n, width in zip(kinds, states, each, strict=True)}
    return held | {"activations": activations(size, plan, rank, kept, points)}


def micro_batch(plan: Plan, batch: int) -> int:
    """Return the examples of the largest micro-batch."""
    parts = plan.dp * plan.micro_batches
    if batch < parts:
        raise WrongInput(
            f"{batch} examples do not fill {plan.micro_batches} micro-batches on each of "
            f"{plan.dp} data ranks; use {parts} or more"
        )
    return -(-batch // parts)


def elements_of(layers: list[Parameters], plan: Plan, buffers: bool) -> tuple[int, int, int]:
    """Return the parameters, gradients and optimizer's parameters that a rank holds of its layers.

    By the table in zero.py, with plan.zero as the stage:

    P  the parameters of all these layers, experts included
    s  the rank's share of them, each layer's rounded up: of its dense parameters over the ranks of
       dp x cp, or plan.shards of these; of its experts over the dp/ep x cp ranks that have copies
    b  with `buffers`, the parameters of the largest layer; else 0
    """
    copies = plan.sharing // plan.ep
    P = sum(layer.dense + layer.experts for layer in layers)
    s = sum(-(-layer.dense // plan.sharing) - (-layer.experts // copies) for layer in layers)
    largest = max(layer.dense + layer.experts for layer in layers) if buffers else 0
    return zero_elements(plan.zero, P, s, largest)


def activations(
    size: TransformerSize,
    plan: Plan,
    rank: int,
    kept: Kept,
    points: Iterable[Entry] | None = None,
) -> int:
    """Return the peak bytes of activations on a rank, over all that its program has in flight.

    A chunk keeps of each micro-batch what its blocks, embedding and head keep; between I and W it
    holds their deferred bytes more. `in_flight` has, by chunk, how many micro-batches a rank holds
    of either kind at once, and `peak_of` the largest sum of their bytes. A rank that has a block
    holds `kept.once` besides, for any number of micro-batches.
    """
    stages = stages_of(size, plan, rank)
    held, more = [], []  # of each chunk, per micro-batch
    for embedding, blocks, head in stages:
        held.append(blocks * kept.block)
        more.append(blocks * kept.deferred_block)
        if embedding:
            held[-1] += kept.embedding
            more[-1] += kept.deferred_end
        if head:
            held[-1] += kept.head
            more[-1] += kept.deferred_end
    if points is None:
        points = in_flight_on(rank, plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
    return peak_of(points, held + more) + (kept.once if any(s.blocks for s in stages) else 0)


def block_keeps(
    size: TransformerSize,
    b: int,
    T: int,
    itemsize: int,
    logarithms: bool | None = None,
) -> BlockBytes:
    """Return the bytes that a block of F wide feed-forward keeps of b examples on one device.

                                                                 numbers      in float32 at least
        outside of split matrices: on every rank of tp, or split by sequence
            two norms: n[b, T, C] and r[b, T] each                            2 bTC + 2 bT
            the inputs of QKV and expand                         2 bTC
            a gate's shares and balancing weights; if k > 1, its gates        b (T + 1) E + bT (k+1)
            of each row for an expert: its place, X and Y        2 C + 1
        attention, split by heads
            Q, K, V; its output, the next product's input        4 bTC
            probabilities P[b, H, T, T], or log Z[b, H, T]       b H T T      b H T
        feed-forward, split by columns
            gelu Y = X s: X and s [b, T, F]                                   2 bTF
            or swiglu: both halves of X, and s                                3 bTF
            the input of contract                                bTF

    F is 4C; of experts, it is k times that of each, and that of the shared one.

    Each expert gets as many rows.

    logarithms  whether attention keeps log Z: by default beyond 128 positions
    """
    rows, C, E, k = b * T, size.width, size.experts, size.top_k
    F = (k + size.shared if E else 1) * size.hidden
    X, wide = rows * C, max(4, itemsize)
    gates = (rows + b) * E + (rows * (k + 1) if k > 1 else 0) if E else 0
    chosen = k * rows if E else 0
    if logarithms is None:
        logarithms = not in_one_piece(T)
    scores = rows * size.heads * (wide if logarithms else T * itemsize)
    return BlockBytes(
        itemsize * (2 * X + (2 * C + 1) * chosen) + wide * (2 * X + 2 * rows + gates),
        itemsize * 4 * X + scores,
        (itemsize + (3 if size.llama else 2) * wide) * rows * F,
    )


def layers_keep(size: TransformerSize, b: int, T: int, plan: Plan, block: BlockBytes) -> Kept:
    """Return the bytes that layers keep on a rank of tp, for those of a block on one device.

    Between I and W, a block has dn beside each n, and the gradients of products beside their
    inputs: outside 2 X of each width more. Inside, 3 F numbers of the narrow width take the place
    of 2 F of each. Embedding and head's norm hold a gradient of X.
    """
    n, itemsize = plan.tp, plan.itemsize
    outside_parts = n if plan.sequence else 1
    rows, X, wide = b * T, b * T * size.width, max(4, itemsize)
    outside, attention, feed_forward = block
    less = 3 * wide - 2 * itemsize if size.llama else 2 * wide - itemsize
    less = less * rows * size.hidden // n
    return Kept(
        itemsize * (X + rows),  # rows of the vocabulary, and whose they are
        outside // outside_parts + attention // n + feed_forward // n,
        (itemsize * X + wide * (X + rows)) // outside_parts + wide * rows * -(-size.vocab // n),
        max(0, 2 * (wide + itemsize) * X - less),
        wide * X // outside_parts,
    )


def minidist(size: TransformerSize, plan: Plan, b: int) -> Kept:
    """Return the bytes that our blocks keep, without dropout; whole numbers count as numbers."""
    T = positions(size, plan)
    one_piece = in_one_piece(size.sequence)
    logarithms = plan.cp > 1 or plan.recompute == "selective" or not one_piece
    kept = layers_keep(size, b, T, plan, block_keeps(size, b, T, plan.itemsize, logarithms))
    if plan.recompute != "full":
        return kept
    inputs = plan.itemsize * b * T * size.width // (plan.tp if plan.sequence else 1)
    again = kept.block
    return kept._replace(block=inputs, deferred_block=again + kept.deferred_block, once=again)


def korthikanti_bytes(B: int, T: int, C: int, H: int, N: int = 1, sequence: bool = False) -> float:
    """Return Korthikanti et al.'s bytes per layer and rank: s = T, b = B, h = C, a = H, t = N.

    sbh (34 + 5 as/h) on one device (section 4.1), sbh (10 + 24/t + 5 as/(ht)) split by matrices
    (4.2.1), sbh/t (34 + 5 as/h) with the sequence split as well (4.2.2).
    """
    return B * T * C * (10 / (N if sequence else 1) + 24 / N + 5 * H * T / (C * N))


def korthikanti(size: TransformerSize, plan: Plan, b: int) -> Kept:
    """Return the paper's bytes of a block (equations 1 to 4, table 2), embedding and head."""
    if size.experts or plan.precision != "mixed":
        raise WrongInput(
            'Korthikanti et al. count dense blocks in 16 bits; use keeps="minidist" for experts '
            "and float32"
        )
    C, H, n, T = size.width, size.heads, plan.tp, positions(size, plan)
    x, split = b * T * C, n if plan.sequence else 1
    block = korthikanti_bytes(b, T, C, H, n, plan.sequence)
    if plan.recompute == "selective":
        block -= 5 * b * H * T * T / n
    elif plan.recompute == "full":
        block = 2 * x
    head = 4 * x // split + 4 * b * T * -(-size.vocab // n)
    return Kept(x // split, ceil(block), head)


CONVENTIONS = {"minidist": minidist, "korthikanti": korthikanti}


def positions(size: TransformerSize, plan: Plan) -> int:
    """Return the positions of an example that a rank of cp has, at most."""
    return -(-size.sequence // plan.cp)
