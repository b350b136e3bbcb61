"""The products of matrices that a call computes, and the same products alone.

    alone = replay(products_of(step))
    share = median_seconds(alone) / median_seconds(step)

No step is faster than its products, so their share says how near a step is to what the machine's
BLAS can do. All products of the package are computed by `backend.matmul` and `batched_matmul`.
Python's profile hook sees them return; neither knows that it is watched.

A product is a matrix times a matrix. A matrix times a vector reads every number once, as a sum
does (kernels/sums.py computes sums in this way); it does not count.
"""

import sys
from bisect import bisect
from collections.abc import Callable
from math import prod
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from minidist.autograd.products import batched_matmul
from minidist.backend import matmul

PAGE = 4096  # bytes
WATCHED = {matmul.__code__, batched_matmul.__code__}


class Place(NamedTuple):
    """Where an array was: bytes low <= i < high, of which it begins at `first`."""

    low: int
    high: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


class Product(NamedTuple):
    """Y[..., n, m] = A[..., n, k] B[..., k, m]."""

    a: Place
    b: Place
    y: Place

    @property
    def multiply_adds(self) -> int:
        return prod(self.y.shape) * self.a.shape[-1]


def multiplies(frame: FrameType) -> bool:
    """Return whether a frame is of a function that computes a product of matrices."""
    if frame.f_code not in WATCHED:
        return False
    a, b = frame.f_locals["a"], frame.f_locals["b"]
    return a.ndim > 1 and b.ndim > 1 and 1 not in (*a.shape[-2:], b.shape[-1])


def products_of(call: Callable[[], object]) -> list[Product]:
    """Run a call on this thread, on the host, and return its products in their order."""
    found = []

    def watch(frame, event, result) -> None:
        if event == "return" and multiplies(frame) and result is not None:
            a, b = frame.f_locals["a"], frame.f_locals["b"]
            found.append(Product(_place(a), _place(b), _place(result)))

    watched(call, watch)
    return found


def watched(call: Callable[[], object], watch: Callable) -> None:
    """Run a call on this thread, under this profile hook of Python's."""
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)


def replay(products: list[Product], arrays: list | None = None) -> Callable[[], None]:
    """Return a call that computes these products once more, of zeros, or of `stand_ins`."""
    arrays = stand_ins(products) if arrays is None else arrays

    def alone() -> None:
        for a, b, y in arrays:
            np.matmul(a, b, out=y)

    return alone


def stand_ins(products: list[Product]) -> list[tuple[np.ndarray, ...]]:
    """Return zeros in place of the arrays of each product.

    They have the same strides, and those that shared memory share it again, so that a product finds
    in the cache what other products have put there.
    """
    spans: list[list[int]] = []
    for low, high in sorted({(x.low, x.high) for product in products for x in product}):
        if spans and low < spans[-1][1]:
            spans[-1][1] = max(high, spans[-1][1])
        else:
            spans.append([low, high])
    starts = [low for low, _ in spans]
    memory = [_zeros(low, high) for low, high in spans]

    def array(place: Place) -> np.ndarray:
        i = bisect(starts, place.low) - 1
        offset = place.first - starts[i]
        return np.ndarray(place.shape, place.dtype, memory[i].data, offset, place.strides)

    return [tuple(map(array, product)) for product in products]


def _place(x: np.ndarray) -> Place:
    return Place(*byte_bounds(x), x.ctypes.data, x.shape, x.strides, x.dtype)


def _zeros(low: int, high: int) -> np.ndarray:
    """Return zero bytes that begin as far behind a page's first byte as `low` does."""
    raw = np.empty(high - low + PAGE, np.uint8)
    raw.fill(0)  # np.zeros would map all its pages to one
    start = (low - raw.ctypes.data) % PAGE
    return raw[start : start + high - low]
