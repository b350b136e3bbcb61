"""Bytes of activations that a layer's forward pass keeps for backward, of one micro-batch.

Two conventions, each a function (size, plan, b) -> Kept, for b examples on one rank:

    keeps="minidist"     what our blocks keep: `block_activation_bytes` (layers.py) in float32,
                         `half_activation_bytes` (mixed_precision.py) where mixed
    keeps="korthikanti"  Korthikanti et al., Reducing Activation Recomputation in Large Transformer
                         Models (2022), section 4 and table 2: with dropout, 2 bytes a number,
                         standard attention

Recomputation, on a block of b T positions with X = b T C:

                    minidist                                 korthikanti (table 2)
    selective       T numbers of a head in place of T T      without 5 H b T T
    full            the block's input X; one block's         2 X
                    activations while it runs again

Over cp (ring attention) a rank has T/cp positions, and keeps no T T either.
"""

from math import ceil
from typing import NamedTuple

from minidist.autograd.attention import WHOLE
from minidist.planning.costs.tensor_parallel import korthikanti_bytes
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plan import Plan


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


def minidist(size: TransformerSize, plan: Plan, b: int) -> Kept:
    """Return what our blocks keep, without dropout; whole numbers are counted as numbers."""
    rows, mixed = b * positions(size, plan), plan.precision == "mixed"
    x, split, item = rows * size.width, plan.tp if plan.sequence else 1, plan.itemsize
    outside, inside, deferred = (half_block if mixed else float_block)(size, plan, b)
    block = outside // split + inside // plan.tp
    norm = 6 * x + 4 * rows if mixed else 4 * (2 * x + rows)
    head = norm // split + 4 * rows * -(-size.vocab // plan.tp)
    full = plan.recompute == "full"
    short, again = (item * x // split, block) if full else (block, 0)
    return Kept(item * (x + rows), short, head, again + deferred, 4 * x // split, again)


def float_block(size: TransformerSize, plan: Plan, b: int) -> tuple[int, int, int]:
    """Return bytes outside of the split matrices, inside, and what may come between I and W."""
    rows = b * positions(size, plan)
    x, gates, chosen = rows * size.width, gate_numbers(size, b, rows), chosen_numbers(size, rows)
    outside = 4 * x + 2 * rows + gates + (2 * chosen + chosen // size.width if chosen else 0)
    inside = 4 * x + scores(size, plan, b) + 12 * (chosen or x)
    return 4 * outside, 4 * inside, 16 * (x - x // plan.tp)


def half_block(size: TransformerSize, plan: Plan, b: int) -> tuple[int, int, int]:
    """Return the same where weights have 2 bytes: norms, gelu's factors and log Z stay in float32.

    Between I and W a norm's n and dn are 16 X, the inputs and gradients of products 8 X, and inside
    of the split 24 X; from forward they were 12 X and 48 X.
    """
    rows = b * positions(size, plan)
    x, gates, chosen = rows * size.width, gate_numbers(size, b, rows), chosen_numbers(size, rows)
    outside = 12 * x + 8 * rows + 4 * gates + (4 * chosen + 2 * chosen // size.width)
    inside = 8 * x + 40 * (chosen or x)
    inside += (4 if without_scores(size, plan) else 2) * scores(size, plan, b)
    return outside, inside, max(0, 12 * x - 24 * x // plan.tp)


def korthikanti(size: TransformerSize, plan: Plan, b: int) -> Kept:
    """Return the paper's bytes of a block (equations 1 to 4, table 2), embedding and head."""
    if size.experts or plan.precision != "mixed":
        raise ValueError(
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


def without_scores(size: TransformerSize, plan: Plan) -> bool:
    """Return whether attention keeps log Z of each position in place of all probabilities."""
    return plan.cp > 1 or plan.recompute == "selective" or size.sequence > WHOLE


def scores(size: TransformerSize, plan: Plan, b: int) -> int:
    """Return how many numbers attention keeps besides Q, K, V and O."""
    T = positions(size, plan)
    return b * size.heads * (T if without_scores(size, plan) else T * T)


def gate_numbers(size: TransformerSize, b: int, rows: int) -> int:
    """Return the numbers of a mixture's gate: shares, balancing weights, gates of the chosen."""
    E, k = size.experts, size.top_k
    return (rows + b) * E + (rows * (k + 1) if k > 1 else 0) if E else 0


def chosen_numbers(size: TransformerSize, rows: int) -> int:
    """Return the numbers of all rows that go to experts, k C per position; each gets as many."""
    return size.top_k * rows * size.width if size.experts else 0
