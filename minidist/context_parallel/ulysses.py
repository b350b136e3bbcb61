"""Ulysses: a rank that holds some positions of all heads gets all positions of some heads.

Jacobs et al., DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models (2023), section 3. Letters: N ranks, T positions, H heads of width D.

    QKV[3, B, H, T/N, D] -> all_to_all -> [3, B, H/N, T, D] -> attention of whole sequences
                                       O[B, H/N, T, D] -> all_to_all -> O[B, H, T/N, D]

Each is the adjoint of the other. Q, K and V travel as one array, so a layer has two all_to_alls
forward: 3 T C and T C numbers (section 3.2). Received positions are written in the order of the
sequence, whatever the cut, because the causal mask of one device expects this order.
"""

from minidist.autograd import Function, Tensor
from minidist.autograd.attention import causal_attention
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.pieces import Positions

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
    whole = array_module(pieces[0]).empty((*outer, held[0].length, D), pieces[0].dtype)
    for piece, positions in zip(pieces, held, strict=True):
        row = 0
        for a, b in positions.runs:
            whole[..., a:b, :] = piece[..., row : row + b - a, :]
            row += b - a
    return whole


def by_rank(whole: Array, held: list[Positions]) -> list[Array]:
    """Return the positions of each rank: the inverse of `in_order`."""
    xp = array_module(whole)
    runs = [[whole[..., a:b, :] for a, b in positions.runs] for positions in held]
    return [xp.concatenate(parts, axis=ROWS) for parts in runs]


def ulysses(qkv: Tensor, group: Group, held: list[Positions]) -> Tensor:
    """Attend over a sequence that no rank holds: QKV[3, B, H, T/N, D] -> O[B, H, T/N, D].

    ValueError unless the ranks divide the heads.
    """
    H, N = qkv.shape[HEADS], group.size
    if H % N:
        raise ValueError(
            f"cannot give {H} heads to {N} ranks; use a multiple of {N} heads, or ring attention, "
            "which splits no heads"
        )
    whole = SequenceToHeads(group, held)(qkv)
    return HeadsToSequence(group, held)(causal_attention(whole))
