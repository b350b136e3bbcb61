"""Products of batches of matrices that are parts of larger arrays, as attention has them.

float16 is multiplied as it is, summed in float32, and rounded only where `out` is float16.

On the host the work is NumPy's, in float32 for float16. On a GPU `cupy.matmul` copies operands that
are transposed or slices, and widens float16 (CuPy 13.6 and 14.2, _core/_routines_linalg.pyx), so
that tensor cores are idle. Therefore cuBLAS is called here, which reads matrices where they are.
"""

import math
from typing import NamedTuple

import numpy as np

from minidist.backend import Array, array_module, on_gpu, widen

SMALL, FEW = 128, 16  # columns of B, rows of A


def batched_matmul(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    """Return Y[..., n, m] = A[..., n, k] B[..., k, m], in `out` if given; `add`: Y += A B.

    The leading axes of A, B and Y are equal.
    """
    if on_gpu(a):
        return _on_gpu(a, b, out, add)
    a, b = widen(a), by_rows(widen(b), a.shape[-2])
    if out is None:
        return a @ b
    if add:
        out += a @ b
    elif out.dtype == a.dtype:
        np.matmul(a, b, out=out)
    else:
        out[...] = a @ b
    return out


def by_rows(b: Array, rows: int) -> Array:
    """Return B[..., k, m] with contiguous rows: OpenBLAS multiplies by a small B^T half as fast."""
    pays = b.strides[-1] != b.itemsize and b.shape[-1] <= SMALL and rows >= FEW
    return np.ascontiguousarray(b) if pays else b


def sum_dtype(x: Array) -> np.dtype:
    """Return the dtype in which elements of x are summed: float32 for float16, else its own."""
    return np.promote_types(x.dtype, np.float32)


def _on_gpu(a: Array, b: Array, out: Array | None, add: bool) -> Array:
    if out is None:
        out = array_module(a).empty((*a.shape[:-1], b.shape[-1]), sum_dtype(a))
    where = layout(out)
    if 0 in (*a.shape, *out.shape):
        out[...] = out if add else 0
    elif where is None or where.transposed:
        product = _on_gpu(a, b, None, False)
        out[...] = out + product if add else product
    else:
        _gemm(a, b, out, where, add)
    return out


class Layout(NamedTuple):
    """Where the matrices of a batch are.

    transposed  whether their columns are contiguous, instead of their rows
    leading     elements from one row, or column, to the next: cuBLAS' leading dimension
    stride      elements from one matrix to the next
    """

    transposed: bool
    leading: int
    stride: int


def layout(x: Array) -> Layout | None:
    """Return the layout of X[..., n, m], or None if cuBLAS cannot read it where it is."""
    *outer, row, column = (step // x.itemsize for step in x.strides)
    *sides, n, m = x.shape
    stride, count = 0, 1
    for side, step in zip(reversed(sides), reversed(outer), strict=True):
        if side > 1:
            stride = step if count == 1 else stride
            if step != stride * count:
                return None
            count *= side
    if (column == 1 or m == 1) and (row >= m or n == 1):
        return Layout(False, max(row, m), stride)
    if (row == 1 or n == 1) and (column >= n or m == 1):
        return Layout(True, max(column, n), stride)
    return None


def readable(x: Array) -> tuple[Array, Layout]:
    """Return x where cuBLAS can read it, a copy if it has to be, and its layout."""
    if place := layout(x):
        return x, place
    n, m = x.shape[-2:]
    return array_module(x).ascontiguousarray(x), Layout(False, m, n * m)


def _gemm(a: Array, b: Array, y: Array, where: Layout, add: bool) -> None:
    """Y = A B or Y += A B, as Y^T = B^T A^T: cuBLAS stores matrices by columns, NumPy by rows.

    cuBLAS' documentation, cublasGemmStridedBatchedEx.
    """
    xp, (n, k), m = array_module(a), a.shape[-2:], b.shape[-1]
    cublas, runtime = xp.cuda.cublas, xp.cuda.runtime
    kinds = {"e": runtime.CUDA_R_16F, "f": runtime.CUDA_R_32F, "d": runtime.CUDA_R_64F}
    (a, right), (b, left) = readable(a), readable(b)
    wide = sum_dtype(a)
    alpha, beta = np.array(1, wide), np.array(add, wide)  # of Y = alpha A B + beta Y
    cublas.gemmStridedBatchedEx(
        xp.cuda.get_cublas_handle(),
        cublas.CUBLAS_OP_T if left.transposed else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_T if right.transposed else cublas.CUBLAS_OP_N,
        *(m, n, k, alpha.ctypes.data),
        *(b.data.ptr, kinds[b.dtype.char], left.leading, left.stride),
        *(a.data.ptr, kinds[a.dtype.char], right.leading, right.stride),
        *(beta.ctypes.data, y.data.ptr, kinds[y.dtype.char], where.leading, where.stride),
        math.prod(y.shape[:-2]),
        cublas.CUBLAS_COMPUTE_64F if wide == np.float64 else cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )
