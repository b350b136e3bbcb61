"""Ulysses: a rank that holds some positions of all heads gets all positions of some heads.

Jacobs et al., DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models (2023), section 3. Letters: N ranks, T positions; K heads of keys and
values of width D, each read by G of the H = K G query heads.

    QKV[G + 2, B, K, T/N, D] -> all_to_all -> [G + 2, B, K/N, T, D] -> attention of whole sequences
                                         O[B, H/N, T, D] -> all_to_all -> O[B, H, T/N, D]

Each is the adjoint of the other. Q, K and V travel as one array, so a layer has two all_to_alls
forward: (1 + 2/G) T C and T C numbers (section 3.2, where G = 1). Received positions are written in
the order of the sequence, whatever the cut, because the causal mask of one device expects it.

Where N does not divide K, each head of keys and values is repeated first, until N divides: with
K = 2 and N = 4 twice, each copy for half of the query heads. So with N > K the copies cancel what
grouped queries save: N heads travel. The gradient of a head is the sum over its copies.
"""

import math
from itertools import accumulate

from minidist.autograd import Function, Tensor
from minidist.autograd.attention import RepeatedHeads, document_attention
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.pieces import Documents, Positions

HEADS, ROWS = -3, -2  # the axes of X[..., H, T, D]


class SequenceToHeads(Function):
    """Forward: X[..., H, T/N, D] -> X[..., H/N, T, D];  backward: the way back."""

    def __init__(self, group: Group, held: list[Positions]):
        self.group, self.held = group, held

    def forward(self, x: Array) -> Array:
        return to_heads(x, self.group, self.held)

    def backward(self, grad: Array) -> Array:
        return to_sequence(grad, self.group, self.held)


class HeadsToSequence(Function):
    """Forward: X[..., H/N, T, D] -> X[..., H, T/N, D];  backward: the way back."""

    def __init__(self, group: Group, held: list[Positions]):
        self.group, self.held = group, held

    def forward(self, x: Array) -> Array:
        return to_sequence(x, self.group, self.held)

    def backward(self, grad: Array) -> Array:
        return to_heads(grad, self.group, self.held)


def to_heads(x: Array, group: Group, held: list[Positions]) -> Array:
    """Give each rank its heads; return all positions of this rank's heads."""
    xp = array_module(x)
    pieces = [xp.ascontiguousarray(piece) for piece in xp.split(x, group.size, axis=HEADS)]
    return in_order(group.all_to_all(pieces, label="heads"), held)


def to_sequence(x: Array, group: Group, held: list[Positions]) -> Array:
    """Give each rank its positions; return all heads of this rank's positions."""
    taken = group.all_to_all(by_rank(x, held), label="sequence")
    return array_module(x).concatenate(taken, axis=HEADS)


def in_order(pieces: list[Array], held: list[Positions]) -> Array:
    """Return X[..., T, D] of the pieces [..., T/N, D] of all ranks, in the sequence's order."""
    *outer, _, D = pieces[0].shape
    sequence = array_module(pieces[0]).empty((*outer, sum(map(len, held)), D), pieces[0].dtype)
    for piece, runs in zip(pieces, rows_of(held), strict=True):
        row = 0
        for a, b in runs:
            sequence[..., a:b, :] = piece[..., row : row + b - a, :]
            row += b - a
    return sequence


def by_rank(whole: Array, held: list[Positions]) -> list[Array]:
    """Return the positions of each rank: the inverse of `in_order`."""
    xp = array_module(whole)
    parts = [[whole[..., a:b, :] for a, b in runs] for runs in rows_of(held)]
    return [xp.concatenate(part, axis=ROWS) for part in parts]


def rows_of(held: list[Positions]) -> list[list[tuple[int, int]]]:
    """Return each rank's runs as (first, last + 1) of the rows that all these ranks hold."""
    runs = sorted(run for positions in held for run in positions.runs)
    starts = accumulate((b - a for a, b in runs), initial=0)
    row = {a: start for (a, _), start in zip(runs, starts, strict=False)}
    return [[(row[a], row[a] + b - a) for a, b in positions.runs] for positions in held]


def shared_heads(qkv: Tensor, group: Group) -> Tensor:
    """Repeat heads of keys and values until the ranks divide them; ValueError if H is no multiple.

    N divides H = K G only if the lcm(K, N) / K copies of a head can share its G queries.
    """
    (blocks, _, K, _, _), N = qkv.shape, group.size
    H, copies = K * (blocks - 2), math.lcm(K, N) // K
    if H % N:
        raise WrongInput(
            f"cannot give {H} heads to {N} ranks; use a multiple of {N} heads, or ring attention, "
            "which splits no heads"
        )
    return qkv if copies == 1 else RepeatedHeads(copies)(qkv)


def ulysses(
    qkv: Tensor, group: Group, held: list[Positions], documents: Documents | None = None
) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[G + 2, B, K, T/N, D] -> O[B, H, T/N, D].

    ValueError unless the ranks divide the query heads.

    documents  (first, last + 1) of each example's documents, in which attention stays; None: one
    """
    heads = SequenceToHeads(group, held)(shared_heads(qkv, group))
    return HeadsToSequence(group, held)(document_attention(heads, documents))
