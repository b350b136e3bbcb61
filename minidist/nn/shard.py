"""Which part of a global array a parameter is, if a rank holds only some rows or columns."""

from dataclasses import dataclass

import numpy as np

from minidist.backend import Array, array_module, beside


@dataclass(frozen=True, eq=False)
class Shard:
    """The elements `indices` along `axis` of an array whose length there is `full`.

    Indices from `full` on are padding: they are held as zeros, and are no part of the whole array.
    """

    axis: int
    indices: np.ndarray
    full: int

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole array, given the shape of a part."""
        return (*shape[: self.axis], self.full, *shape[self.axis + 1 :])

    def of(self, whole: Array) -> Array:
        """Return a copy of this part of the whole array."""
        if whole.shape[self.axis] != self.full:
            raise ValueError(
                f"this is a part of {self.full} along axis {self.axis}, "
                f"not of an array of {list(whole.shape)}"
            )
        xp, real = array_module(whole), self.indices < self.full
        part = xp.take(whole, beside(np.where(real, self.indices, 0), whole), axis=self.axis)
        if not real.all():
            part[(slice(None),) * self.axis + (beside(~real, whole),)] = 0
        return part

    def join(self, parts: Array, indices: np.ndarray) -> Array:
        """Return the whole array, given all parts along `axis` and their indices."""
        order = np.argsort(indices, kind="stable")[: self.full]
        return array_module(parts).take(parts, beside(order, parts), axis=self.axis)
