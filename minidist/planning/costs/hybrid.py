"""What a mesh of data, pipeline and tensor ranks moves, holds and waits for."""

from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Programs
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, positions_of
from minidist.planning.costs.layers import Layer, heads_of, split_transformer_layers, width_of
from minidist.planning.costs.pipeline_parallel import (
    layout,
    pipeline_costs,
    pipeline_useful_share,
)
from minidist.planning.costs.tensor_parallel import repeated, vocabulary


def mesh_of(
    N: int,
    dp: int = 1,
    pp: int = 1,
    tp: int | None = None,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    chunks: int = 1,
    **_,
) -> tuple[int, int, int, Programs]:
    """Return (dp, tp, m, the programs of each pipeline), for the options of a case on N ranks."""
    return dp, N // (dp * pp), micro_batches, programs(schedule, pp, micro_batches, chunks)


def hybrid_bytes(case: Workload, N: int) -> int:
    """Return the bytes that the axes move, each by its formula, with S = B T C itemsize.

    tp  8 (N - 1) S per block (10 with the sequence split), 4 (5) for embedding and head, and three
        all_reduces of B T in the loss; if the sequence is split, the gradients of repeated parts
    pp  2 S per boundary from each of tp ranks (S/tp if the sequence is split); a tied embedding
    dp  an all_reduce of all parameters that a rank holds, on each of pp x tp ranks
    and the loss, a number, over pp and over dp.
    """
    dp, tp, _, order = mesh_of(N, **case.options)
    pp, split = len(order), case.options.get("split_sequence", False)
    _, crossed, copies = layout(case.model, order)
    named, depth, width = (
        case.model.named_parameters(),
        len(case.model.layers) - 2,
        width_of(case.model),
    )
    S = ITEMSIZE * case.inputs.size * width
    whole = set(repeated(named))
    held = {n: ITEMSIZE * p.size * (tp if n in whole else 1) for n, p in named.items()}
    for name in vocabulary(named):
        held[name] = ITEMSIZE * width * tp * -(-case.model.vocab // tp)  # with padding
    held = {name: size * named[name].requires_grad for name, size in held.items()}
    over_tp = (tp - 1) * ((10 * depth + 5 if split else 8 * depth + 4) * S + 48 * case.inputs.size)
    over_tp += 2 * (tp - 1) * sum(held[name] // tp for name in whole) * dp if split else 0
    over_pp = len(crossed) * 2 * S * (1 if split else tp)
    over_pp += dp * sum(2 * (copies[name] - 1) * held[name] for name in named)
    over_dp = 2 * (dp - 1) * sum(held[name] * copies[name] for name in named)
    loss = 2 * ITEMSIZE * ((pp - 1) * dp * tp + (dp - 1) * pp * tp)
    return over_tp + over_pp + over_dp + loss


def hybrid_costs(case: Workload, N: int) -> list[Cost]:
    """Every rank has a part of the matrices of its stage's layers, and a share of the examples."""
    dp, tp, m, order = mesh_of(N, **case.options)
    stages = pipeline_costs(case, order, m, _layers(case, tp), dp)
    return [stages[i // tp % len(order)] for i in range(N)]


def hybrid_useful_share(case: Workload, N: int) -> float:
    dp, tp, m, order = mesh_of(N, **case.options)
    return pipeline_useful_share(case, order, m, N, _layers(case, tp), dp)


def hybrid_limit(case: Workload, ranks: int) -> tuple[int, str]:
    number = len(case.inputs) * len(case.model.layers) * heads_of(case.model)
    return number, "examples x layers x heads"


def _layers(case: Workload, tp: int) -> list[Layer]:
    return split_transformer_layers(case.model, positions_of(case), tp)
