"""Weights that travel as int8, with a scale for each block: ZeRO++'s quantized gather.

Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training (2023),
qwZ. Letters: W.r the shard of rank r, cut into blocks of n elements; s bytes of a scale.

    rank r     scale = max |w| / 127 of a block,   level = round(w / scale),   int8
    travel     levels and scales:                  1 + s/n bytes an element
    all ranks  w' = scale level,                   |w' - w| <= scale / 2

Every rank computes with w', also of its own shard; the gradient is exactly the one at w'. It
updates w, which stays whole in its shard: so the errors of rounding do not add up over the steps.
One scale for all would be the largest element's: small blocks lose less, and send more.
"""

from numbers import Integral

from minidist.backend import Array, array_module, widen
from minidist.comm import Group
from minidist.data_parallel.zero_layers import LayerShard
from minidist.errors import check_number
from minidist.pieces import split_sizes

LEVELS = 127  # on each side of 0


class QuantizedGather:
    """Gather a shard's run as int8; `block` elements share a scale."""

    def __init__(self, block: int):
        check_number("block is a whole number from 1", block, lambda n: n >= 1, Integral)
        self.block = block

    def __call__(self, shard: LayerShard, group: Group, label: str) -> None:
        """Fill the run with every rank's shard, rounded."""
        levels, scales = quantize(shard.parameter.data, self.block)
        levels = group.all_gather(levels, label=f"{label}: levels")
        scales = group.all_gather(scales, label=f"{label}: scales")
        place, level, scale = shard.run.data, 0, 0
        for size in split_sizes(place.size, group.size):  # a rank's last block may be shorter
            blocks = -(-size // self.block)
            mine = slice(level, level + size)
            place[mine] = dequantize(levels[mine], scales[scale : scale + blocks], self.block)
            level, scale = level + size, scale + blocks


def size_of_block(block: int, n: int) -> int:
    """Return the elements of each block of an array of n elements: at most n, and at least 1."""
    return max(1, min(block, n))


def quantize(w: Array, block: int) -> tuple[Array, Array]:
    """Return the levels [n] of w [n], int8, and the scales [ceil(n / block)], float32 or wider."""
    block = size_of_block(block, w.size)
    xp, wide, blocks = array_module(w), widen(w), -(-w.size // block)
    padded = xp.zeros(blocks * block, wide.dtype)
    padded[: w.size] = wide
    rows = padded.reshape(blocks, block)
    scales = abs(rows).max(axis=1) / LEVELS
    levels = xp.rint(rows / xp.where(scales > 0, scales, 1)[:, None])
    levels = xp.maximum(-LEVELS, xp.minimum(levels, LEVELS))
    return levels.astype("int8").reshape(-1)[: w.size], scales


def dequantize(levels: Array, scales: Array, block: int) -> Array:
    """Return the numbers [n] of levels [n] and the scales of their blocks, in the scales' dtype."""
    block = size_of_block(block, levels.size)
    of_each = array_module(levels).broadcast_to(scales[:, None], (scales.size, block))
    return levels * of_each.reshape(-1)[: levels.size]
