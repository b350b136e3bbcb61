"""Whole matrices for an update that is not elementwise (Muon's), from the parts that ranks hold.

Letters: N ranks; S bytes of a matrix; H of all its parts on all ranks together: S where the ranks
split it, d S where d ranks have copies; h of the parts on its owner.

    parts of U           -> all_to_all -> U[A, B] on its owner        S - h bytes
    update(U)[A, B]      -> all_to_all -> parts of it                 H - h bytes

    owners "one"     One rank of those that hold a part updates a matrix, so that the ranks share
                     the work (Jordan 2024): 2 S (N - 1)/N bytes if N ranks have equal parts
    owners "every"   All of them do, and nothing comes back: S (N - 1) bytes, and N times the work
                     (Liu et al. 2025, Muon is Scalable for LLM Training, section 2.3)

ZeRO's shards are runs of a layer's flat vector, so only matrices through which a cut goes travel.
The slices of parameters (nn.Slice) say which rank holds which elements, whatever has cut the model.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from minidist.backend import Array, array_module, on_device_of
from minidist.comm import Group
from minidist.errors import WrongInput, check_name
from minidist.nn import Slice
from minidist.nn.optim.muon import Parts, Update
from minidist.nn.shard import pieces


class Part(NamedTuple):
    """What a rank has of a matrix; `number` counts the rank's parts of all matrices."""

    rank: int
    number: int
    cut: Slice


class Move(NamedTuple):
    """Elements of a part, from a rank to another one or to itself.

    taken, places   which ones: in the part, and in the whole matrix in C order
    """

    part: Part
    source: int
    target: int
    taken: np.ndarray
    places: np.ndarray


class WholeMatrices:
    """What an optimizer passes parts of matrices to, and gets the same parts of their updates from.

        optim.Muon(zero.parameters(), lr=1e-3, whole=WholeMatrices(group))

    group   all ranks that train the model: each of them takes every step
    owners  "one" or "every" rank that holds a part of a matrix updates it
    there, back   what moves to owners and from them, in one order on all ranks; no ledger counts
            the bytes by which they agree, before the first step
    """

    def __init__(self, group: Group, owners: str = "one"):
        check_name("choice of owners", owners, ("one", "every"))
        self.group, self.owners, self.dtype = group, owners, ""
        self.there: list[Move] | None = None
        self.back: list[Move] = []

    def __call__(self, parts: Parts, update: Update) -> list[Array]:
        """Return the parts of the updates; every rank calls this, also one without a part."""
        if self.there is None:
            self.there = self.agree(parts)
        wholes: dict[str, Array] = {}
        for move, numbers in self.travel(self.there, lambda m: _taken(parts, m), "matrices"):
            cut, xp = move.part.cut, array_module(numbers)
            whole = wholes.setdefault(cut.name, xp.empty(cut.shape, numbers.dtype))
            whole.reshape(-1)[on_device_of(move.places, whole)] = numbers
        made = {name: update(name, whole) for name, whole in wholes.items()}
        back = self.travel(self.back, lambda m: m.part.cut.of(made[m.part.cut.name]), "updates")
        updates = {move.part.number: numbers for move, numbers in back}
        return [updates[number] for number in range(len(parts))]

    def travel(
        self, moves: list[Move], numbers_of: Callable[[Move], Array], label: str
    ) -> Iterator[tuple[Move, Array]]:
        """Yield the moves that end on this rank, each with its numbers."""
        if not moves:  # on no rank
            return
        rank, at = self.group.rank, [0] * self.group.size
        boxes = [[self.group.empty((0,), self.dtype)] for _ in at]
        for move in moves:
            if move.source == rank != move.target:
                boxes[move.target].append(numbers_of(move))
        came = self.group.all_to_all([array_module(*b).concatenate(b) for b in boxes], label)
        for move in moves:
            if move.target == rank == move.source:
                yield move, numbers_of(move)
            elif move.target == rank:
                at[move.source] += len(move.taken)
                end = at[move.source]
                yield move, came[move.source][end - len(move.taken) : end]

    def agree(self, parts: Parts) -> list[Move]:
        """Tell all ranks which parts this one has; return what moves to owners, note what back."""
        own = np.frombuffer(pickle.dumps([(cut, str(u.dtype)) for cut, u in parts]), np.uint8)
        apart = self.group.split(0)
        every = io.BytesIO(apart.all_gather(own).tobytes())
        held: dict[str, list[Part]] = {}
        for rank in range(apart.size):
            for number, (cut, self.dtype) in enumerate(pickle.load(every)):
                held.setdefault(cut.name, []).append(Part(rank, number, cut))
        ranks = {name: [part.rank for part in held[name]] for name in held}
        shapes, there = {name: held[name][0].cut.shape for name in held}, []
        one = owners_of(shapes, ranks)
        for name, own_parts in held.items():
            owners = ranks[name] if self.owners == "every" else [one[name]]
            for owner in dict.fromkeys(owners):
                there += made_up(own_parts, owner)
            for part in own_parts:
                source = part.rank if part.rank in owners else owners[0]
                everything = np.arange(len(part.cut))
                self.back.append(Move(part, source, part.rank, everything, everything))
        return there


def owners_of(shapes: dict[str, tuple[int, ...]], ranks: dict[str, list[int]]) -> dict[str, int]:
    """Return one of each matrix's ranks: the most work first, to the rank that has least so far."""
    owners, busy = {}, dict.fromkeys((r for own in ranks.values() for r in own), 0)
    work = {name: min(s) ** 2 * (2 * max(s) + min(s)) for name, s in shapes.items()}
    for name in sorted(shapes, key=lambda name: -work[name]):
        owners[name] = min(ranks[name], key=lambda r: (busy[r], r))
        busy[owners[name]] += work[name]
    return owners


def made_up(parts: list[Part], owner: int) -> list[Move]:
    """Return how the parts of a matrix make it up on its owner: its own first, none twice."""
    parts = sorted(parts, key=lambda part: part.rank != owner)
    whole = Slice.whole(parts[0].cut.name, parts[0].cut.shape)
    moves = [
        Move(parts[piece.number], parts[piece.number].rank, owner, piece.taken, piece.places)
        for piece in pieces(whole, [part.cut for part in parts])
    ]
    if missing := len(whole) - sum(len(move.taken) for move in moves):
        raise WrongInput(
            f"no rank has {missing} of the elements of {whole.name}{list(whole.shape)}; give "
            "WholeMatrices the group of all ranks that train the model"
        )
    return moves


def _taken(parts: Parts, move: Move) -> Array:
    u = parts[move.part.number][1]
    return u[on_device_of(move.taken, u)]
