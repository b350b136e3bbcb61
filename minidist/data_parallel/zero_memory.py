"""Where ZeRO keeps what is not kept whole, and how much memory is alive at once."""

from collections.abc import Iterable

from minidist import nn
from minidist.backend import Array, address
from minidist.data_parallel.layer_shard import LayerShard
from minidist.nn.flat_parameters import FlatParameters

BUFFERS = {1: 0, 2: 1, 3: 3}  # of a stage


class ZeroMemory:
    """The buffers that layers share, and the most bytes that were alive.

    places  buffers, each as large as the largest layer: one for gradients (stages 2 and 3), two
            for weights (stage 3)
    peak    the most bytes of weights and gradients alive at once
    """

    def __init__(self, flats: list[FlatParameters], stage: int):
        largest = max(flats, key=lambda flat: flat.vector.nbytes)
        weights, gradients = largest.vector.nbytes, max(flat.gradient.nbytes for flat in flats)
        sizes = [gradients, weights, weights][: BUFFERS[stage]]
        self.places = [largest.empty((nbytes,), "uint8") for nbytes in sizes]
        self.peak = 0
        if stage > 1:
            for flat in flats:
                flat.bind(flat.vector, as_vector(self.places[0], flat.gradient))

    def weights_of(self, k: int, flat: FlatParameters) -> Array:
        """Return where layer k's weights are gathered: neighbours use two buffers in turn."""
        return as_vector(self.places[1 + k % 2], flat.vector)

    def sample(self, parameters: Iterable[nn.Parameter], shards: list[LayerShard]) -> None:
        """Record how many bytes of weights and gradients are alive; count shared ones once."""
        homes = [home for s in shards for home in (s.whole, s.part)]
        alive = [array for home in homes for array in (home.vector, home.gradient)]
        alive += [p.grad for p in parameters if p.grad is not None] + self.places
        self.peak = max(self.peak, bytes_of(alive))


def bytes_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of all arrays together; views of the same memory count once."""
    total = reached = 0
    for start, nbytes in sorted((address(a), a.nbytes) for a in arrays):
        total += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return total


def as_vector(place: Array, like: Array) -> Array:
    """Return the first bytes of a buffer as a vector of the size and dtype of another one."""
    return place[: like.nbytes].view(like.dtype)
