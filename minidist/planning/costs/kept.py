"""Bytes of activations that a layer's forward pass keeps for backward, of one micro-batch.

Two conventions, each a function (size, plan, b) -> Kept, for b examples on one rank:

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

from math import ceil
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pieces import in_one_piece
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Plan


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


class Parts(NamedTuple):
    """How many parts there are of attention, of the feed-forward matrices, of the vocabulary.

    vocabulary  None: not split, so that no rows are looked up for other ranks
    sequence    parts of what is outside of split matrices
    """

    heads: int = 1
    columns: int = 1
    vocabulary: int | None = None
    sequence: int = 1


class BlockBytes(NamedTuple):
    """Bytes that a block's forward leaves for its backward."""

    outside: int
    attention: int
    feed_forward: int


def block_keeps(
    size: TransformerSize,
    b: int,
    T: int,
    itemsize: int,
    logarithms: bool | None = None,
    routed: bool = False,
) -> BlockBytes:
    """Return what a block keeps of b examples, on one device, where feed-forward is F wide.

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

    logarithms  whether attention keeps log Z: by default beyond 128 positions
    routed      whether the rows for experts are counted elsewhere; else each expert gets as many
    """
    rows, C, E, k = b * T, size.width, size.experts, size.top_k
    F = ((0 if routed else k) + size.shared if E else 1) * size.hidden
    X, wide = rows * C, max(4, itemsize)
    gates = (rows + b) * E + (rows * (k + 1) if k > 1 else 0) if E else 0
    chosen = k * rows if E and not routed else 0
    if logarithms is None:
        logarithms = not in_one_piece(T)
    scores = rows * size.heads * (wide if logarithms else T * itemsize)
    return BlockBytes(
        itemsize * (2 * X + (2 * C + 1) * chosen) + wide * (2 * X + 2 * rows + gates),
        itemsize * 4 * X + scores,
        (itemsize + (3 if size.llama else 2) * wide) * rows * F,
    )


def kept(
    size: TransformerSize, b: int, T: int, itemsize: int, parts: Parts, block: BlockBytes
) -> Kept:
    """Return what the layers keep on a rank, for what a block keeps on one device.

    Between I and W, a block has dn beside each n, and the gradients of products beside their
    inputs: outside 2 X of each width more. Inside, 3 F numbers of the narrow width take the place
    of 2 F of each. Embedding and head's norm hold a gradient of X.
    """
    rows, X, wide = b * T, b * T * size.width, max(4, itemsize)
    outside, inside, feed_forward = block
    tokens = -(-size.vocab // (parts.vocabulary or 1))
    less = (
        (3 * wide - 2 * itemsize if size.llama else 2 * wide - itemsize)
        * rows
        * size.hidden
        // parts.columns
    )
    return Kept(
        0 if parts.vocabulary is None else itemsize * (X + rows),  # rows, and whose
        outside // parts.sequence + inside // parts.heads + feed_forward // parts.columns,
        (itemsize * X + wide * (X + rows)) // parts.sequence + wide * rows * tokens,
        max(0, 2 * (wide + itemsize) * X - less),
        wide * X // parts.sequence,
    )


def minidist(size: TransformerSize, plan: Plan, b: int) -> Kept:
    """Return what our blocks keep, without dropout; whole numbers are counted as numbers."""
    T, n, item = positions(size, plan), plan.tp, plan.itemsize
    whole = in_one_piece(size.sequence)
    logarithms = plan.cp > 1 or plan.recompute == "selective" or not whole
    parts = Parts(n, n, n, n if plan.sequence else 1)
    found = kept(size, b, T, item, parts, block_keeps(size, b, T, item, logarithms))
    if plan.recompute != "full":
        return found
    inputs, again = item * b * T * size.width // parts.sequence, found.block
    return found._replace(block=inputs, deferred_block=again + found.deferred_block, once=again)


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
