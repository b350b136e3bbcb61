"""What split convolutions leave if their communication has one mistake.

Rows of images are cut on one device: whatever crosses a border is a row that is read, and a
gradient that is added to a row. Channels are split on threads, and one layer is replaced.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.autograd.convolution import convolution
from minidist.comm import Group, run
from minidist.comm.collectives import split_ends
from minidist.nn.linear import ACTIVATIONS
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.tensor_parallel.spatial_parallel import ROWS, Halos
from minidist.tools.strategies.cases import INPUT, Case, as_input, one_device
from minidist.tools.strategies.tensor_parallel import whole_gradients

Gradients = dict[str, np.ndarray]
NOWHERE = -1  # a row of zeros; a gradient that is dropped


@dataclass(frozen=True)
class Mistake:
    """With the rows that a rank needs from others: what it reads, and where their gradients go.

    read, back  (row, the rows of the rank that has it) -> row
    overwrites  whether ranks' gradients of one row replace each other, in rank order
    local       whether batch norm takes each rank's rows for the images
    """

    read: Callable[[int, range], int] = lambda row, own: row
    back: Callable[[int, range], int] = lambda row, own: row
    overwrites: bool = False
    local: bool = False


def nowhere(row: int, own: range) -> int:
    return NOWHERE


def mirrored(row: int, own: range) -> int:
    """The row at the other end."""
    return own.start + own.stop - 1 - row


EXCHANGES = {
    "rows whose gradients are not sent back": Mistake(back=nowhere),
    "rows whose gradients replace those of their own rank, and are not added": Mistake(
        overwrites=True
    ),
    "rows that are zeros: none is exchanged": Mistake(read=nowhere, back=nowhere),
    "rows from the other end of the neighbour's": Mistake(read=mirrored),
    "each rank's own statistics: batch norm is not synchronised": Mistake(local=True),
}


class CutRows(Function):
    """X[B, C, H, W] -> the rows that each rank needs, one rank after the other."""

    def __init__(self, halos: Halos, mistake: Mistake):
        ranks, H = range(len(halos.ends) - 1), halos.ends[-1]
        self.mistake, self.read, self.back, self.sizes = mistake, [], [], []
        for r in ranks:
            self.sizes.append(len(halos.needs(r)))
            for row in halos.needs(r):
                q = next((q for q in ranks if row in halos.own(q)), r)
                inside, foreign = 0 <= row < H, q != r
                ways = (mistake.read, mistake.back) if foreign else (lambda row, own: row,) * 2
                read, back = (way(row, halos.own(q)) if inside else NOWHERE for way in ways)
                self.read.append(read)
                self.back.append(back)

    def forward(self, x):
        self.shape, read = x.shape, np.array(self.read)
        return np.where((read >= 0)[:, None], x[:, :, read], 0)

    def backward(self, grad):
        dx = np.zeros(self.shape, grad.dtype)
        for i, row in enumerate(self.back):
            if row >= 0:
                before = 0 if self.mistake.overwrites else dx[:, :, row]
                dx[:, :, row] = before + grad[:, :, i]
        return dx


class OnCutRows(nn.Module):
    """A layer on the rows that each rank needs; its outputs are joined to whole images."""

    def __init__(self, layer: nn.Module, halos: Halos, mistake: Mistake):
        self.layer, self.halos, self.mistake = layer, halos, mistake

    def forward(self, x, randomness=None):
        cut = CutRows(self.halos, self.mistake)
        y, ends = cut(x), accumulate(cut.sizes, initial=0)
        return functions.concatenate([self.layer(y[:, :, a:b]) for a, b in pairwise(ends)], ROWS)


class LocalNorm(nn.Module):
    """Batch norm of each rank's rows; the running statistics are rank 0's."""

    def __init__(self, norm: nn.BatchNorm, ends: tuple[int, ...]):
        self.norm, self.ends = norm, ends

    def forward(self, x, randomness=None):
        parts = []
        for a, b in pairwise(self.ends):
            norm = self.norm if a == 0 else copy.copy(self.norm)
            if a:
                norm.running_mean, norm.running_var = copy.deepcopy(
                    (norm.running_mean, norm.running_var)
                )
            parts.append(norm(x[:, :, a:b]))
        return functions.concatenate(parts, ROWS)


def with_exchange(case: Case, ranks: int, mistake: Mistake) -> Gradients:
    """Return one device's gradients if images are cut into the rows of ranks, with a mistake."""
    model = copy.deepcopy(case.model)
    stem, *blocks, _ = model.layers
    ends = _cut(stem.first, tuple(split_ends(case.inputs.shape[ROWS], ranks)), mistake)
    for block in blocks:
        if block.skip is not None:
            halos = Halos(ends, 2, 2)
            block.pool = OnCutRows(block.pool, halos, mistake)
            _cut(block.skip, halos.after, mistake)
        ends = _cut(block.second, _cut(block.first, ends, mistake), mistake)
    return one_device(replace(case, model=model))


def _cut(layer: nn.Module, ends: tuple[int, ...], mistake: Mistake) -> tuple[int, ...]:
    conv = layer.conv
    halos = Halos(ends, conv.weight.shape[2], conv.stride, conv.padding)
    conv.padding = (0, conv.padding)  # the rows of zeros are among those that a rank needs
    layer.conv = OnCutRows(conv, halos, mistake)
    if mistake.local:
        layer.norm = LocalNorm(layer.norm, halos.after)
    return halos.after


class Without(nn.Module):
    """A split convolution that adds nothing up, in forward nor in backward."""

    def __init__(self, conv: nn.Module):
        self.conv = conv

    def forward(self, x, randomness=None):
        conv = self.conv
        y = convolution(x, conv.weight, conv.bias, conv.stride, conv.padding)
        return ACTIVATIONS[conv.activation](y)


def without_g(model: nn.CNN, group: Group) -> None:
    for block in model.layers[1:-1]:
        block.second.conv = Without(block.second.conv)


def without_f(model: nn.CNN, group: Group) -> None:
    for block in model.layers[1:-1]:
        block.first.conv = Without(block.first.conv)


def with_summed_statistics(model: nn.CNN, group: Group) -> None:
    for block in model.layers[1:-1]:
        block.first.norm.sum_over_ranks = partial(group.all_reduce, label="statistics")


SUMS = {
    "only its own input channels on each rank: the sum after them, g, is missing": without_g,
    "only its own filters' part of dX on each rank: the sum before them, f, is missing": without_f,
    "the statistics of different channels added up, as if ranks had different examples": (
        with_summed_statistics
    ),
}


def with_sums(case: Case, ranks: int, mistake: Callable) -> list[Gradients]:
    """Return what each rank has if channels are split, with a mistake."""

    def worker(group):
        model, x = channel_parallel(copy.deepcopy(case.model), group, False), as_input(case.inputs)
        mistake(model, group)
        case.loss(model(x), case.targets).backward()
        found = whole_gradients(model, group)
        return found | ({INPUT: x.grad} if isinstance(x, Tensor) else {})

    return run(worker, ranks, transport="thread")


def explanations(case: Case, rows: int, channels: int) -> dict[str, Callable[[], list[Gradients]]]:
    """Return {the mistake in words: what computes the gradients of the ranks, or of rank 0}.

    rows, channels  numbers of ranks among which each is split; 1: not split
    """
    if not isinstance(case.model, nn.CNN):
        return {}
    of_rows = {
        f"halos of {what}" if not mistake.local else what: (
            lambda mistake=mistake: [with_exchange(case, rows, mistake)]
        )
        for what, mistake in EXCHANGES.items()
    }
    of_channels = {
        what: lambda mistake=mistake: with_sums(case, channels, mistake)
        for what, mistake in SUMS.items()
    }
    return (of_rows if rows > 1 else {}) | (of_channels if channels > 1 else {})
