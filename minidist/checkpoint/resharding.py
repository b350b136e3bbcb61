"""Which elements of saved slices make up another slice: reading on another number of ranks.

    saved by 2 ranks      a a a a | b b b
    wanted by 3           a a a | a b | b b       the second: element 3 of a, element 0 of b

What ranks hold are slices (nn.Slice), whatever has cut the model; both are of one global array.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from minidist.nn import Slice


@dataclass(frozen=True, eq=False)
class Piece:
    """What one saved slice gives to a wanted one: elements `taken` of it go to `places` there.

    number  of the saved slice
    """

    number: int
    taken: np.ndarray
    places: np.ndarray


def pieces(wanted: Slice, saved: Sequence[Slice]) -> list[Piece]:
    """Return where each element of a slice is found.

    An element is taken once: of several saved slices that have it, the first one gives it. A saved
    slice gives one piece, or none if it gives no element. Padding, which is no element of the
    global array, is in no piece, and so is an element that no saved slice has.
    """
    positions = wanted.positions()
    real = np.flatnonzero(positions >= 0)
    places = np.full(prod(wanted.shape), -1)  # in the wanted slice; -1: not wanted, or found
    places[positions[real]] = real
    found = []
    for number, cut in enumerate(saved):
        at = cut.positions()
        taken = np.flatnonzero((at >= 0) & (places[at] >= 0))
        if len(taken):
            found.append(Piece(number, taken, places[at[taken]]))
            places[at[taken]] = -1
    return found


def have_all(described: Iterable[dict], shape: Sequence[int]) -> bool:
    """Return whether described slices have all elements of an array: see manifest.describe.

    The slices of one part have to make it up, and such parts the array, along one axis.
    """
    parts: dict[tuple, list] = defaultdict(list)
    whole: dict[int, list] = defaultdict(list)
    for cut in described:
        parts[cut["axis"], tuple(map(tuple, cut["runs"] or ()))].append((cut["start"], cut["stop"]))
    for (axis, runs), intervals in parts.items():
        sides = list(shape)
        if axis is not None:
            sides[axis] = sum(b - a for a, b in runs)
        if cover(intervals, prod(sides)):
            if axis is None:
                return True
            whole[axis] += runs
    return any(cover(runs, shape[axis]) for axis, runs in whole.items())


def cover(intervals: Iterable[tuple[int, int]], end: int) -> bool:
    """Return whether every number from 0 to `end` is in one of these intervals."""
    at = 0
    for a, b in sorted(intervals):
        if a <= at:
            at = max(at, b)
    return at >= end
