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
# NumPy's reduceat: the first element of a run plus the pairwise sum of the others, which is cut in
# halves, multiples of 8, down to 128 and there sums 8 interleaved parts. `stack` has the sums of
# the left halves that still wait for their right ones.
_sum_runs = Elementwise(
    "sum_runs",
    "raw S grad, raw int64 order, raw int64 starts, int64 columns",
    "T sum",
    """
    long long run = i / columns, column = i % columns;
    long long begin = starts[run], others = starts[run + 1] - begin - 1;
    S stack[32];
    int depth = 0;
    for (long long at = 0; at < others; ) {
        long long low = 0, size = others, k;
        int rights = 0;
        while (size > 128) {
            long long half = size / 2 - size / 2 % 8;
            bool left = at < low + half;
            low = left ? low : low + half;
            size = left ? half : size - half;
            rights = left ? 0 : rights + 1;
        }
        at += size;
        low += begin + 1;
        long long even = low + size - size % 8, stop = low + size;
        S leaf = grad[order[low] * columns + column];
        if (size >= 8) {
            S lane[8];
            for (k = 0; k < 8; k++) lane[k] = grad[order[low + k] * columns + column];
            for (k = low + 8; k < even; k++) {
                lane[(k - low) % 8] += grad[order[k] * columns + column];
            }
            leaf = ((lane[0] + lane[1]) + (lane[2] + lane[3]))
                + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
            low = even - 1;
        }
        for (k = low + 1; k < stop; k++) leaf += grad[order[k] * columns + column];
        for (; rights > 0; rights--) leaf = stack[--depth] + leaf;
        stack[depth++] = leaf;
    }
    S total = others < 0 ? S(0) : S(grad[order[begin] * columns + column]);
    sum = others > 0 ? total + stack[0] : total""",
)


def rows_of(table: Array, indices: Array) -> Array:
    """Return W[indices[...]] of W[V, C]; on a GPU an index outside [0, V) makes a row of nan."""
    if not on_gpu(table):
        return table[indices]
    y = array_module(table).empty((*indices.shape, table.shape[1]), table.dtype)
    return _rows_of(table, indices.reshape(-1), *table.shape, math.nan, y)


def sum_into_rows(grad: Array, indices: Array, out: Array) -> Array:
    """out[V, C] = for each row v, the sum of dY[N, C] where indices[N] = v, in their order.

    The sum sorts the places by index and adds up each run. The order is the same every time, and
    on a GPU as on the host, and so are the bits; float16 is summed in float32 and rounded once.
    """
    if on_gpu(grad):
        order = indices.argsort()  # on a GPU it is stable: CuPy has no other
        starts = _run_starts(indices, order, indices.size, size=len(out) + 1)
        return _sum_runs(widen(grad), order, starts, out.shape[1], out)
    out.fill(0)
    if indices.size:
        order = np.argsort(indices, kind="stable")
        rows, starts = np.unique(indices[order], return_index=True)
        out[rows] = np.add.reduceat(grad[order], starts, axis=0)
    return out
