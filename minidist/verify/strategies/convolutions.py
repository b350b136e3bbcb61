"""Split convolutions: by channels, and by the rows of images."""

from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.nn.cnn import ConvBlock
from minidist.rng import generator
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.tensor_parallel.spatial_parallel import ROWS, own_rows, spatial_parallel, sum_partial
from minidist.verify.strategies.cases import INPUT, Case, as_input, collect, of_kind, random_weights
from minidist.verify.strategies.job import Arrays, Job, OnLoss
from minidist.verify.strategies.record import Costs, Models, Strategy
from minidist.verify.strategies.sync_batch_norm import cnn_example
from minidist.verify.strategies.tensor_parallel import Loss, Matrices

CNN = Models("an nn.CNN", lambda model: isinstance(model, nn.CNN))


def by_channels(group: Group, case: Case) -> tuple[nn.Module, Loss]:
    """Return a CNN whose blocks' channels are split, and its loss."""
    return channel_parallel(of_kind(nn.CNN, case.model), group), case.loss


class RowsOfImages(Job):
    """A CNN on this rank's rows of all images."""

    def __init__(self, group: Group, case: Case):
        cnn = of_kind(nn.CNN, case.model)
        super().__init__(group, case, spatial_parallel(cnn, group, case.inputs.shape[ROWS]))
        self.x = as_input(own_rows(case.inputs, group))

    def backward(self, on_loss: OnLoss) -> None:
        on_loss(self.case.loss(self.model(self.x), self.case.targets)).backward()
        sum_partial(of_kind(nn.CNN, self.model), self.group)

    def result(self) -> Arrays:
        found = collect(self.model, self.x)
        return found | {INPUT: self.group.all_gather(found[INPUT], ROWS)}


def cnn_cases(ranks: int) -> list[Case]:
    """Five images and one; blocks with and without a skip's convolution; rows that come uneven."""
    random, cases = generator(0, "convolution cases"), []
    for B, H, widths in ((5, 8, (12, 12, 24)), (1, 10, (12, 24))):
        images, labels = 1 + random.standard_normal((B, 2, H, 6)), random.integers(0, 3, B)
        model = random_weights(nn.CNN(2, 3, widths, seed=1, dtype="float64"))
        cases.append(Case(f"CNN of {len(widths)} blocks, images {B}", model, images, labels))
    return cases


def blocks(case: Case) -> list[ConvBlock]:
    layers = of_kind(nn.CNN, case.model).layers
    return [layer for layer in layers if isinstance(layer, ConvBlock)]


def rows_of_the_last_block(case: Case) -> int:
    """Return the rows of its output: a skip with a convolution goes with half the rows."""
    halvings = sum(block.skip is not None for block in blocks(case))
    return -(-case.inputs.shape[2] // 2**halvings)


def _record(name: str, **fields) -> Strategy:
    """Return a record; `fields` are what it has of its own."""
    return Strategy(
        name=name,
        family="convolutions",
        files=(f"tensor_parallel/{name}_parallel.py",),
        lesson="17_convolutions",
        cases=cnn_cases,
        models=CNN,
        tests=(f"tensor_parallel/test_{name}_parallel.py",),
        **fields,
    )


STRATEGIES = [
    _record(
        name="channel",
        idea="convolutions cut by filters, then by channels",
        term="切分层次, CNN通道",
        paper="Dryden et al. 2019 (SC)",
        start=partial(Matrices, split=by_channels),
        costs=Costs(
            limit=lambda case, ranks: (
                min(b.second.norm.gain.size for b in blocks(case)),
                "channels",
            ),
            cuts="matrices",
            example=cnn_example,
        ),
    ),
    _record(
        name="spatial",
        idea="rows of images over ranks, with halos",
        term="空间切分, 光环交换",
        paper="Dryden et al. 2019 (IPDPS)",
        start=RowsOfImages,
        costs=Costs(
            limit=lambda case, ranks: (rows_of_the_last_block(case), "rows"),
            cuts="positions",
            example=cnn_example,
        ),
    ),
]
