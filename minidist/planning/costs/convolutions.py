"""What a CNN sends, holds and computes on N ranks that split its channels, or its images' rows.

Letters: B images X[B, C, H, W]; F channels of a block's output, C of its input. Convolutions see
3 x 3 pixels. For rows: e is the first row of a rank, at a border between two ranks.
"""

from dataclasses import dataclass

from minidist.pieces import split_ends
from minidist.planning.costs.cost import Workload

Ends = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """The stem or a block, from C to F channels.

    ends, after  where the ranks' rows of its input end, and of its output
    width        of the output's rows
    halves       whether the output has half the rows and columns, and the skip a convolution
    """

    C: int
    F: int
    ends: Ends
    after: Ends
    width: int
    halves: bool

    before = property(lambda self: self.width * (2 if self.halves else 1))


def blocks_of(case: Workload, N: int) -> list[Block]:
    """Return the stem and the blocks, for rows as equal as can be; a rank's rows halve rounded up.

    A window of stride 2 belongs to the rank that has its middle row, an even one.
    """
    stem, *blocks, _ = case.model.layers
    _, C, H, W = case.inputs.shape
    ends = tuple(split_ends(H, N))
    result = [Block(C, stem.first.norm.gain.size, ends, ends, W, False)]
    for block in blocks:
        last, halves = result[-1], block.skip is not None
        ends, width = last.after, last.width // (2 if halves else 1)
        after = tuple(-(-end // 2) for end in ends) if halves else ends
        F = block.second.norm.gain.size
        result.append(Block(last.F, F, ends, after, width, halves))
    return result


def channel_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(b.F for b in blocks_of(case, 1)[1:]), "channels"


def spatial_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(b.after[-1] for b in blocks_of(case, 1)), "rows"


def block_bytes(B: int, C: int, H: int, W: int, itemsize: int, N: int) -> dict[str, int]:
    """Return what all ranks send for a block of C channels in forward and backward: {cut: bytes}.

    channels  two all_reduces of X[B, C, H, W]
    halos     2 rows per border and convolution, both ways
    weights   an all_reduce of two convolutions' gradients, where rows are split
    """
    return {
        "channels": 2 * 2 * (N - 1) * B * C * H * W * itemsize,
        "halos": 2 * 2 * 2 * (N - 1) * B * C * W * itemsize,
        "weights": 2 * (N - 1) * 2 * 9 * C * C * itemsize,
    }
