"""What split matrices move and hold.  N ranks; one activation has S = B T C itemsize bytes."""

from collections.abc import Callable
from functools import partial

from minidist.planning.costs.cost import ITEMSIZE, Workload
from minidist.planning.costs.layers import (
    heads_of,
    shapes_of,
)


def column_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_gather of Y forward and an all_reduce of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(F + 2 * C for C, F in shapes))


def row_bytes(case: Workload, N: int) -> int:
    """Return, per layer [C, F], an all_reduce of Y forward and an all_gather of dX backward."""
    shapes = shapes_of(case.model)
    return _bytes(case, N, sum(2 * F + C for C, F in shapes))


def _bytes(case: Workload, N: int, numbers: int) -> int:
    """Return (N - 1) times `numbers` float64 per example, or per position of each."""
    rows = case.inputs.size if case.inputs.dtype.kind in "iu" else len(case.inputs)
    return (N - 1) * rows * numbers * ITEMSIZE


def _narrowest(axis: int, what: str, case: Workload, ranks: int) -> tuple[int, str]:
    return min(shape[axis] for shape in shapes_of(case.model)), what


row_limit: Callable = partial(_narrowest, 0, "rows")
column_limit: Callable = partial(_narrowest, 1, "columns")


def attention_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return heads_of(case.model), "heads"


def sequence_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(heads_of(case.model), case.inputs.shape[1]), "heads"


def vocab_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return case.model.vocab, "tokens"
