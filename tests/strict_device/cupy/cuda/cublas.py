"""One product of cuBLAS, on addresses (CuPy: cupy_backends/cuda/libs/cublas.pyx).

It follows cuBLAS' documentation: matrices are stored by columns, and op T is a transposed view of
what is stored. What cuBLAS answers with an error is an error; so is an address outside of the
current device's arrays.
"""

import ctypes

import numpy as np

from .. import _counters
from . import memory, runtime

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F = 68, 70
DTYPES = {
    runtime.CUDA_R_16F: np.dtype(np.float16),
    runtime.CUDA_R_32F: np.dtype(np.float32),
    runtime.CUDA_R_64F: np.dtype(np.float64),
}
SUPPORTED = {  # (A and B, C) of a compute type
    CUBLAS_COMPUTE_32F: {("e", "e"), ("e", "f"), ("f", "f")},
    CUBLAS_COMPUTE_64F: {("d", "d")},
}


class CUBLASError(RuntimeError):
    """A call of cuBLAS failed."""


def gemmStridedBatchedEx(
    handle, transa, transb, m, n, k, alpha,
    A, Atype, lda, strideA, B, Btype, ldb, strideB, beta,
    C, Ctype, ldc, strideC, batchCount, computeType, algo,
):  # fmt: skip
    """C[i] = alpha op(A[i]) op(B[i]) + beta C[i], by columns: op(A)[m, k], op(B)[k, n]."""
    wide = np.dtype(np.float64 if computeType == CUBLAS_COMPUTE_64F else np.float32)
    kinds = DTYPES[Atype].char, DTYPES[Ctype].char
    if Atype != Btype or kinds not in SUPPORTED[computeType]:
        raise CUBLASError("CUBLAS_STATUS_NOT_SUPPORTED")
    if handle != get_cublas_handle() or min(m, n, k, batchCount) < 1:
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    a = matrices(A, DTYPES[Atype], m, k, transa, lda, strideA, batchCount)
    b = matrices(B, DTYPES[Btype], k, n, transb, ldb, strideB, batchCount)
    c = matrices(C, DTYPES[Ctype], m, n, CUBLAS_OP_N, ldc, strideC, batchCount, writes=True)
    alpha, beta = (host(address, wide.itemsize).view(wide)[0] for address in (alpha, beta))
    with np.errstate(all="ignore"):
        product = alpha * np.matmul(a.astype(wide), b.astype(wide))
        c[...] = product if beta == 0 else product + beta * c
    _counters.launched(c.size)


def get_cublas_handle() -> int:
    """Return the current device's handle (CuPy: cuda/device.pyx)."""
    return 1 + runtime.getDevice()


def host(address: int, nbytes: int) -> np.ndarray:
    """Return the bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def matrices(address, dtype, rows, columns, op, leading, stride, count, writes=False):
    """Return op(X)[count, rows, columns] as a view of what is stored."""
    if op == CUBLAS_OP_T:
        return matrices(address, dtype, columns, rows, 0, leading, stride, count).swapaxes(-1, -2)
    if leading < rows or stride < 0:
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    elements = (count - 1) * stride + (columns - 1) * leading + rows
    nbytes = elements * dtype.itemsize
    flat = host(address, nbytes).view(dtype)
    memory.at(address, nbytes)._use(flat, writes)
    steps = [step * dtype.itemsize for step in (stride, 1, leading)]
    return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), steps)
