"""What a mesh of data, pipeline, context, tensor and expert ranks moves, holds and waits for."""

from typing import NamedTuple

from minidist.context_parallel.cuts import Cut, zigzag
from minidist.pipeline_parallel.actions import Programs, micro_batches_of
from minidist.pipeline_parallel.schedules import order_of
from minidist.planning.costs.cost import Workload
from minidist.planning.costs.layers import (
    heads_of,
)


class MeshSplit(NamedTuple):
    """How a case is split on a mesh: the ranks of each axis, and what else its options say."""

    order: Programs
    m: int
    tp: int
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dispatch: str = "rows"
    split_sequence: bool = False
    zero: int = 0
    attention: str = "ring"
    positions: Cut = zigzag
    ulysses: int = 1
    shards: int | None = None


def split_of(
    N: int,
    schedule: str | list = "1f1b",
    micro_batches: int | None = None,
    chunks: int | None = None,
    **options,
) -> MeshSplit:
    """Return how the options of a case split it on N ranks; what no other axis has, tp has."""
    axes = {name: options[name] for name in MeshSplit._fields[3:] if name in options}
    dp, pp, cp = (axes.get(axis, 1) for axis in ("dp", "pp", "cp"))
    order = order_of(schedule, pp, micro_batches, chunks)
    return MeshSplit(order, micro_batches_of(order), N // (dp * pp * cp), **axes)


def hybrid_limit(case: Workload, ranks: int) -> tuple[int, str]:
    number = case.inputs.size * len(case.model.layers) * heads_of(case.model)
    return number, "examples x positions x layers x heads"
