"""Which part of a global array a rank holds, and which parts that others hold make up another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minidist.backend import Array, array_module, on_device_of
from minidist.errors import WrongInput


@dataclass(frozen=True, eq=False)
class Shard:
    """The elements `indices` along `axis` of an array whose length there is `full`.

    Indices from `full` on are padding: they are held as zeros, and are no part of the whole array.

    copy  0 on the first of the ranks that hold these elements: in a sum over all, only it counts
    """

    axis: int
    indices: np.ndarray
    full: int
    copy: int = 0

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole array, given the shape of a part."""
        return (*shape[: self.axis], self.full, *shape[self.axis + 1 :])

    def of(self, whole: Array) -> Array:
        """Return a copy of this part of the whole array."""
        if whole.shape[self.axis] != self.full:
            raise WrongInput(
                f"this is a part of {self.full} along axis {self.axis}, "
                f"not of an array of {list(whole.shape)}"
            )
        xp, real = array_module(whole), self.indices < self.full
        part = xp.take(whole, on_device_of(np.where(real, self.indices, 0), whole), axis=self.axis)
        if not real.all():
            part[(slice(None),) * self.axis + (on_device_of(~real, whole),)] = 0
        return part

    def join(self, parts: Array, indices: np.ndarray) -> Array:
        """Return the whole array, given all parts along `axis` and their indices."""
        order = np.unique(indices, return_index=True)[1][: self.full]  # one of each
        return array_module(parts).take(parts, on_device_of(order, parts), axis=self.axis)


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements `start` to `stop`, in C order, of a part of the global array `name`.

    This is how everything that cuts a model says what a rank holds: a split matrix is all of its
    part; a shard of ZeRO is a run of elements of several parameters, one Slice for each.

    shape  of the global array
    shard  the part, or None for all of the global array
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None
    start: int
    stop: int

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "Slice":
        """Return all elements of a global array."""
        return cls(name, shape, None, 0, math.prod(shape))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part whose elements these are."""
        if self.shard is None:
            return self.shape
        axis = self.shard.axis
        return (*self.shape[:axis], len(self.shard.indices), *self.shape[axis + 1 :])

    def within(self, start: int, stop: int) -> "Slice":
        """Return the elements start to stop of this slice."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def of(self, whole: Array) -> Array:
        """Return these elements of the global array: a vector."""
        part = whole if self.shard is None else self.shard.of(whole)
        return part.reshape(-1)[self.start : self.stop]

    def positions(self) -> np.ndarray:
        """Return the place of each element in the global array, in C order; -1: padding."""
        if self.shard is None:
            return np.arange(self.start, self.stop)
        cut, inner = self.shard, math.prod(self.shape[self.shard.axis + 1 :])
        rows, within = np.divmod(np.arange(self.start, self.stop), inner)
        before, at = np.divmod(rows, len(cut.indices))
        index = cut.indices[at]
        return np.where(index < cut.full, (before * cut.full + index) * inner + within, -1)


@dataclass(frozen=True, eq=False)
class Piece:
    """What one saved slice gives to a wanted one: elements `taken` of it go to `places` there.

    number  of the saved slice
    """

    number: int
    taken: np.ndarray
    places: np.ndarray


def pieces(wanted: Slice, saved: Sequence[Slice]) -> list[Piece]:
    """Return the pieces of saved slices that make up a wanted one.

    An element is taken once: of several saved slices that have it, the first one gives it. A saved
    slice gives one piece, or none if it gives no element. Padding, which is no element of the
    global array, is in no piece, and so is an element that no saved slice has.
    """
    positions = wanted.positions()
    real = np.flatnonzero(positions >= 0)
    places = np.full(math.prod(wanted.shape), -1)  # in the wanted slice; -1: not wanted, or taken
    places[positions[real]] = real
    taken_pieces = []
    for number, cut in enumerate(saved):
        at = cut.positions()
        taken = np.flatnonzero((at >= 0) & (places[at] >= 0))
        if len(taken):
            taken_pieces.append(Piece(number, taken, places[at[taken]]))
            places[at[taken]] = -1
    return taken_pieces
