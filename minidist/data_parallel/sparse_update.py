"""Sparse updates: a worker sends only those rows of a flat gradient that are not all zeros.

A batch of B T tokens touches at most B T of an embedding's V rows. The gradients of all other rows
are zero, and a server whose optimizer leaves such rows alone does not need them.

    weight[V, C]  ->  blocks of C elements        bias[C]  ->  one block
    message       ->  numbers of the touched blocks, int64, and then the elements of these blocks

Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014), section 3.2,
send a range of (key, value) pairs in the same way.
"""

import numpy as np

from minidist.backend import Array, to_host
from minidist.nn.flat_parameters import FlatParameters


class Blocks:
    """The rows of all parameters in elements start to stop of a flat vector.

    ends  where each row begins and ends, counted from `start`; rows are cut at start and stop
    """

    def __init__(self, flat: FlatParameters, start: int, stop: int):
        ends = {start, stop}
        for offset, shape, p in zip(flat.offsets, flat.shapes, flat.parameters, strict=True):
            row = max(1, shape[-1] if len(shape) > 1 else p.size)
            ends.update(end for end in range(offset, offset + p.size, row) if start < end < stop)
        self.ends = np.array(sorted(ends)) - start
        self.sizes = np.diff(self.ends)

    def pack(self, gradient: Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the blocks that are not all zeros, and their elements."""
        gradient = to_host(gradient)
        if not len(gradient):
            return np.zeros(0, np.int64), gradient
        touched = np.logical_or.reduceat(gradient != 0, self.ends[:-1])
        return np.flatnonzero(touched), gradient[np.repeat(touched, self.sizes)]

    def positions(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions of the elements of these blocks."""
        if not len(numbers):
            return np.zeros(0, np.int64)
        return np.concatenate([np.arange(self.ends[n], self.ends[n + 1]) for n in numbers])


def add_up(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Add sparse vectors, each (positions, elements), in this order; return one such pair."""
    everywhere = np.unique(np.concatenate([positions for positions, _ in parts]))
    total = np.zeros(len(everywhere), parts[0][1].dtype)
    for positions, elements in parts:
        total[np.searchsorted(everywhere, positions)] += elements
    return everywhere, total
