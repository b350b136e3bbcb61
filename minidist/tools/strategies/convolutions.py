"""Split convolutions: by channels, and by the rows of images."""

from functools import partial

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.planning.costs import convolutions as costs
from minidist.rng import generator
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.tensor_parallel.spatial_parallel import ROWS, own_rows, spatial_parallel, sum_partial
from minidist.tools.costs.watch import Watch, watched_step
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bytes_sent,
    collect,
    random_weights,
)
from minidist.tools.strategies.record import Costs, Models, Strategy
from minidist.tools.strategies.sync_batch_norm import cnn_example
from minidist.tools.strategies.tensor_parallel import by_matrices, tensor_step, tensor_worker

CNN = Models("an nn.CNN", lambda model: isinstance(model, nn.CNN))


def by_channels(group: Group, case: Case) -> tuple[nn.Module, ...]:
    """Return a CNN whose blocks' channels are split, and its loss."""
    return channel_parallel(case.model, group), case.loss


def spatial_worker(group: Group, case: Case) -> Outcome:
    """Run forward and backward on this rank's rows of all images; return whole gradients."""
    model, x = _rows_of(group, case)
    case.loss(model(x), case.targets).backward()
    sum_partial(model, group)
    moved = bytes_sent(group)
    result = collect(model)
    if isinstance(x, Tensor):
        result[INPUT] = group.all_gather(x.grad, ROWS)
    return Outcome(result, moved.total(), operations=dict(moved))


def spatial_step(group: Group, case: Case, watch: Watch) -> None:
    """One step with AdamW, watched."""
    model, x = _rows_of(group, case)

    def loss():
        return case.loss(model(x), case.targets)

    watched_step(watch, group, model, loss, partial(sum_partial, model, group))


def _rows_of(group: Group, case: Case) -> tuple[nn.Module, Tensor]:
    model = spatial_parallel(case.model, group, case.inputs.shape[ROWS])
    return model, as_input(own_rows(case.inputs, group))


def by_rows_of_images(case: Case, ranks: int) -> Split:
    return Split(rows=ranks)


def cnn_cases(ranks: int) -> list[Case]:
    """Five images and one; blocks with and without a skip's convolution; rows that come uneven."""
    random, cases = generator(0, "convolution cases"), []
    for B, H, widths in ((5, 8, (12, 12, 24)), (1, 10, (12, 24))):
        images, labels = 1 + random.standard_normal((B, 2, H, 6)), random.integers(0, 3, B)
        model = random_weights(nn.CNN(2, 3, widths, seed=1, dtype="float64"))
        cases.append(Case(f"CNN of {len(widths)} blocks, images {B}", model, images, labels))
    return cases


def _record(name: str, idea: str, term: str, paper: str, **more) -> Strategy:
    return Strategy(
        name=name,
        idea=idea,
        term=term,
        paper=paper,
        family="convolutions",
        files=(f"tensor_parallel/{name}_parallel.py",),
        lesson="17_convolutions_and_batch_norm",
        promise="exact",
        cases=cnn_cases,
        models=CNN,
        tests=(f"tensor_parallel/test_{name}_parallel.py",),
        **more,
    )


STRATEGIES = [
    _record(
        "channel",
        "convolutions cut by filters, then by channels",
        "切分层次, CNN通道",
        "Dryden et al. 2019 (SC)",
        worker=partial(tensor_worker, split=by_channels),
        costs=Costs(
            costs.channel_bytes,
            costs.channel_costs,
            partial(tensor_step, split=by_channels),
            costs.channel_limit,
            "matrices",
            example=cnn_example,
        ),
        split=by_matrices,
    ),
    _record(
        "spatial",
        "rows of images over ranks, with halos",
        "空间切分, 光环交换",
        "Dryden et al. 2019 (IPDPS)",
        worker=spatial_worker,
        costs=Costs(
            costs.spatial_bytes,
            costs.spatial_costs,
            spatial_step,
            costs.spatial_limit,
            "positions",
            example=cnn_example,
        ),
        split=by_rows_of_images,
    ),
]
