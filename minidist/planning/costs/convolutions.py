"""What a CNN sends, holds and computes on N ranks that split its channels, or its images' rows.

Letters: B images X[B, C, H, W]; F channels of a block's output, C of its input. Convolutions see
3 x 3 pixels. For rows: e is the first row of a rank, at a border between two ranks.
"""

from dataclasses import dataclass

from minidist import nn
from minidist.pieces import split_ends
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, cost_of
from minidist.planning.costs.layers import cnn_layers, of_convolutions, pooled_head

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


def channel_bytes(case: Workload, N: int) -> int:
    """Return the bytes of two all_reduces per block: of the second convolution's output, of dX."""
    images = sum(
        b.F * b.after[-1] * b.width + b.C * b.ends[-1] * b.before for b in blocks_of(case, N)[1:]
    )
    return 2 * (N - 1) * len(case.inputs) * images * ITEMSIZE


def halo_numbers(block: Block) -> int:
    """Return how many numbers of one image the halos of a block have, over all borders.

    A convolution: 2 rows per border; with stride 2, 1 row: of the lower rank if e is even, else of
    the upper one. Pooling 2 x 2 pixels: 1 row if e is odd.
    """
    borders, odd = len(block.ends) - 2, sum(e % 2 for e in block.ends[1:-1])
    if block.halves:
        of_input = (borders + odd) * block.C * block.before
    else:
        of_input = 2 * borders * block.C * block.before
    return of_input + 2 * borders * block.F * block.width


def spatial_bytes(case: Workload, N: int) -> int:
    """Return the bytes of halos both ways, and of all_reduces: norms, images' means, gradients.

    A norm of F channels that trains sums 2 F + 1 numbers forward and 2 F backward, the head C per
    image.
    """
    stem, *blocks = blocks_of(case, N)
    halos = 2 * (N - 1) * stem.C * stem.width + sum(map(halo_numbers, blocks))
    norms = sum(4 * n.gain.size + 1 for n in case.model.modules(nn.BatchNorm) if n.training)
    below = [p for layer in case.model.layers[:-1] for p in layer.parameters()]
    summed = norms + len(case.inputs) * blocks[-1].F + sum(p.size for p in below if p.requires_grad)
    return ITEMSIZE * (2 * len(case.inputs) * halos + 2 * (N - 1) * summed)


def channel_costs(case: Workload, N: int) -> list[Cost]:
    """Between its two convolutions a block has F/N channels; all else is on every rank."""
    own = cnn_layers(case.model, case.inputs.shape[1:], channels=N)
    return [cost_of(own, len(case.inputs), 1)] * N


def spatial_costs(case: Workload, N: int) -> list[Cost]:
    """Each rank has its rows of every image; a convolution keeps them with their halos."""
    stem, *blocks = blocks_of(case, N)
    found = []
    for r in range(N):
        own = []
        for b in [stem, *blocks]:
            before, rows = (ends[r + 1] - ends[r] for ends in (b.ends, b.after))
            seen = 2 * rows + 1 if b.halves else before + 2
            kept = b.C * seen * b.before + 2 * b.F * rows * b.width
            parts = [(b.C, b.F, 3)]
            if b is not stem:
                parts.append((b.F, b.F, 3))
                kept += (b.F * (rows + 2) + 2 * b.F * rows) * b.width
            if b.halves:
                parts.append((b.C, b.F, 1))
                kept += (b.C + b.F) * rows * b.width
            own.append(of_convolutions(parts, rows * b.width, kept))
        own.append(pooled_head(case.model.layers[-1]))
        found.append(cost_of(own, len(case.inputs), 1))
    return found


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
