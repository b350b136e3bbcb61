"""What a cut sequence leaves if attention, or what is told of positions, has one mistake.

Computed on one device, with all scores at once. Ranks hold T_0, ..., T_(N-1) positions; the row of
a position is its place among those of its rank.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.positions import Positions
from minidist.rng import Randomness
from minidist.tools.strategies.cases import Case, one_device

Gradients = dict[str, np.ndarray]


class Held:
    """The cut, as arrays: rank[T], row[T]; place[T], if the ranks' positions follow each other."""

    def __init__(self, held: tuple[Positions, ...]):
        T = held[0].length
        self.rank, self.row, self.place = np.zeros((3, T), int)
        self.runs = [np.arange(a, b) for own in held for a, b in own.runs]
        self.sizes = [len(own) for own in held]
        self.of = [own.indices for own in held]
        for r, own in enumerate(self.of):
            self.rank[own], self.row[own] = r, np.arange(len(own))
            self.place[own] = sum(self.sizes[:r]) + np.arange(len(own))

    def other(self, ranks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the positions in these rows of these ranks, which hold equally many."""
        return np.array(self.of)[ranks, rows]


@dataclass(frozen=True)
class Mistake:
    """visible    [T, T]: the keys that a query sees; None: those at the same and earlier positions
    added      whether partial softmaxes over runs of keys are added up without their weights
    own_keys   whether backward takes this rank's K and V for every block
    one_short  whether dK and dV of other ranks' queries end one hop before their own rank
    """

    visible: np.ndarray | None = None
    added: bool = False
    own_keys: bool = False
    one_short: bool = False


class Attention(Function):
    """`autograd.attention.CausalAttention`, with a mistake."""

    def __init__(self, held: Held, mistake: Mistake):
        self.held, self.mistake = held, mistake

    def forward(self, qkv):
        self.q, self.k, self.v = qkv
        T, D = qkv.shape[-2:]
        visible = np.tri(T, dtype=bool) if self.mistake.visible is None else self.mistake.visible
        self.scale, self.hidden = 1 / np.sqrt(D), np.where(visible, 0, -np.inf)
        self.scores = self.q @ self.k.swapaxes(-1, -2) * self.scale  # [B, H, T, T]
        masked = self.scores + self.hidden
        self.p, self.log_z = softmax(masked)
        self.o = self.p @ self.v
        if self.mistake.added:
            parts = [softmax(masked[..., r])[0] @ self.v[..., r, :] for r in self.held.runs]
            self.o = sum(parts)
        return self.o

    def backward(self, grad):
        p, dp = self.p, grad @ self.v.swapaxes(-1, -2)
        T = p.shape[-1]
        used = np.broadcast_to(np.arange(T), (T, T))  # query i meets, for key j, key used[i, j]
        if self.mistake.own_keys:  # in row j of the rank that holds i
            used = self.held.other(self.held.rank[:, None], self.held.row[None, :])
            scores, dp = (x[..., np.arange(T)[:, None], used] for x in (self.scores, dp))
            p = np.exp(scores + self.hidden - self.log_z)
        ds = p * (dp - (grad * self.o).sum(-1, keepdims=True)) * self.scale
        of_keys = np.zeros_like(ds)
        np.add.at(of_keys, (..., np.arange(T)[:, None], used), ds)
        return np.stack([of_keys @ self.k, self.to_keys(ds, self.q), self.to_keys(p, grad)])

    def to_keys(self, weights, x):
        """Return weights^T x, the part of other ranks' queries where the mistake leaves it."""
        if not self.mistake.one_short:
            return weights.swapaxes(-1, -2) @ x
        rank, N = self.held.rank, len(self.held.sizes)
        own = rank[:, None] == rank[None, :]
        foreign = np.where(own, 0, weights).swapaxes(-1, -2) @ x
        whose = self.held.other((rank + 1) % N, self.held.row)
        return np.where(own, weights, 0).swapaxes(-1, -2) @ x + foreign[..., whose, :]


def softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and log Z over the last axis; zeros for a query that sees no key."""
    largest = np.maximum(scores.max(-1, keepdims=True), -1e300)
    p = np.exp(scores - largest)
    z = p.sum(-1, keepdims=True)
    return p / np.where(z > 0, z, 1), largest + np.log(np.where(z > 0, z, 1))


class LocalPositions(nn.Module):
    """The embedding of a Transformer, the positions of every rank counted from 0."""

    def __init__(self, embedding: nn.TokenAndPosition, held: Held):
        self.token, self.position = embedding.token, embedding.position
        self.dropout, self.rows = embedding.dropout, held.row

    def forward(self, tokens, randomness: Randomness | None = None) -> Tensor:
        rows = functions.embedding(self.rows, self.position.weight)
        return self.dropout(self.token(tokens) + rows, randomness)


def with_mistake(case: Case, held: Held, mistake: Mistake) -> Gradients:
    """Return one device's gradients, if every block attends with this mistake."""
    model = copy.deepcopy(case.model)
    for block in model.layers[1:-1]:
        block.attention.attend = lambda qkv, randomness: Attention(held, mistake)(qkv)
    return one_device(replace(case, model=model))


def with_local_positions(case: Case, held: Held) -> Gradients:
    embedding, *layers = copy.deepcopy(case.model).layers
    model = nn.Sequential([LocalPositions(embedding, held), *layers])
    return one_device(replace(case, model=model))


def explanations(case: Case, positions: tuple[Positions, ...]) -> dict[str, Callable]:
    """Return {the mistake in words: what computes its gradients}; {} if no sequence is cut."""
    if not positions:
        return {}
    held = Held(positions)
    row, place = held.row, held.place
    attention = {
        "partial softmaxes added up without their weights Z_i / Z": Mistake(added=True),
        "a mask by the rows of the ranks instead of the positions": Mistake(row[:, None] >= row),
        "positions in the order of the ranks instead of the sequence's": Mistake(
            place[:, None] >= place
        ),
    }
    if len(set(held.sizes)) == 1:
        attention |= {
            "dK and dV of other ranks' queries left one hop before their own rank": Mistake(
                one_short=True
            ),
            "this rank's own K and V for every block in backward": Mistake(own_keys=True),
        }
    found = {
        f"attention with {words}": lambda mistake=mistake: with_mistake(case, held, mistake)
        for words, mistake in attention.items()
    }
    return found | {
        "the positions of every rank counted from 0": lambda: with_local_positions(case, held)
    }
