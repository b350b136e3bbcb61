"""Rows of a table W[V, C] by index, and the sum of gradients into them."""

import math

import numpy as np

from minidist.autograd.kernels.launch import Elementwise
from minidist.backend import Array, array_module, on_gpu, widen

_rows_of = Elementwise(
    "rows_of",
    "raw T table, raw I indices, int64 rows, int64 columns, float32 outside",
    "T y",
    """
    long long row = indices[i / columns];
    if (row >= 0 && row < rows) y = table[row * columns + i % columns];
    else y = outside""",
)
_run_starts = Elementwise(
    "run_starts",
    "raw I indices, raw int64 order, int64 count",
    "int64 start",
    """
    long long low = 0, high = count;
    while (low < high) {
        long long middle = (low + high) / 2, index = indices[order[middle]];
        if (index < i) low = middle + 1;
        else high = middle;
    }
    start = low""",
)
_sum_runs = Elementwise(
    "sum_runs",
    "raw T grad, raw int64 order, raw int64 starts, int64 columns",
    "T sum",
    """
    long long run = i / columns, column = i % columns;
    double total = 0;
    for (long long k = starts[run]; k < starts[run + 1]; k++) {
        total += double(grad[order[k] * columns + column]);
    }
    sum = T(total)""",
)


def rows_of(table: Array, indices: Array) -> Array:
    """Return W[indices[...]] of W[V, C]; on a GPU an index outside [0, V) makes a row of nan."""
    if not on_gpu(table):
        return table[indices]
    y = array_module(table).empty((*indices.shape, table.shape[1]), table.dtype)
    return _rows_of(table, indices.reshape(-1), *table.shape, math.nan, y)


def sum_into_rows(grad: Array, indices: Array, out: Array) -> Array:
    """out[V, C] = for each row v, the sum of dY[N, C] where indices[N] = v, in their order.

    The places are sorted by index, and each run of equal indices is added up in one fixed order:
    every call gives the same bits. A GPU adds one element after the other in float64, and rounds
    once. The host adds pairwise, in float32 for float16; so its last bits differ from the GPU's.
    """
    if on_gpu(grad):
        order = indices.argsort()  # on a GPU it is stable: CuPy has no other
        starts = _run_starts(indices, order, indices.size, size=len(out) + 1)
        return _sum_runs(grad, order, starts, out.shape[1], out)
    out.fill(0)
    if indices.size:
        order = np.argsort(indices, kind="stable")
        rows, starts = np.unique(indices[order], return_index=True)
        out[rows] = np.add.reduceat(widen(grad[order]), starts, axis=0)
    return out
