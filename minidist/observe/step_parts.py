"""How long a step takes, and where its time goes: products, element-wise functions, copies, Python.

    alone = computed_again(products_of(step))
    share = median_seconds(alone) / median_seconds(step)
    parts = step_parts(step, tiny)    # tiny: a step of as many calls, on next to nothing

No step is faster than its products of matrices, so their share says how near a step is to what the
machine's BLAS can do. All products of the package are computed by `backend.matmul` and
`batched_matmul`. Python's profile hook sees them return; neither knows that it is watched. A
product with a vector reads every number once, as a sum does; it does not count.

element-wise  what else the functions of the graph compute, number by number; the optimizer
copies        what is left, which memory limits: copies into another layout, sums of gradients
Python        the tiny step, and therefore what every call takes however small its arrays are

The hook takes time, as long in the tiny step, so the first three parts are differences of the two
steps. Python is timed without it. Times of parts are this thread's own, on a core.
"""

import sys
from bisect import bisect
from collections.abc import Callable
from math import prod
from statistics import median
from time import process_time, thread_time
from types import FrameType
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from minidist.autograd.products import batched_matmul
from minidist.backend import matmul
from minidist.events import Clock


class CoreClock(Clock):
    """This thread's time on a core, whoever else wants that core."""

    def now(self) -> float:
        return thread_time()


class ProcessClock(Clock):
    """The time of all threads of this process on cores, whoever else wants those cores."""

    def now(self) -> float:
        return process_time()


def median_seconds(
    call: Callable[[], object],
    meet: Callable[[], object] = lambda: None,
    repeats: int = 15,
    clock: Clock | None = None,
) -> float:
    """Return the median seconds of call(), after one call that warms it up.

    meet   makes ranks begin together: a barrier
    clock  by default the machine's; a GPU's is read when all calls are queued
    """
    clock = clock or Clock()
    call()
    spans = []
    for _ in range(repeats):
        meet()
        start = clock.now()
        call()
        spans.append((start, clock.now()))
    return median(clock.seconds(stop) - clock.seconds(start) for start, stop in spans)


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
    products = []

    def watch(frame, event, result) -> None:
        if event == "return" and multiplies(frame) and result is not None:
            a, b = frame.f_locals["a"], frame.f_locals["b"]
            products.append(Product(_place(a), _place(b), _place(result)))

    watched(call, watch)
    return products


def watched(call: Callable[[], object], watch: Callable) -> None:
    """Run a call on this thread, under this profile hook of Python's."""
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)


def computed_again(products: list[Product], arrays: list | None = None) -> Callable[[], None]:
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


ROOMS = {  # whose functions belong to a part; others belong to the part of their caller
    "minidist.autograd.attention": "element-wise",
    "minidist.autograd.functions": "element-wise",
    "minidist.autograd.kernels": "element-wise",
    "minidist.autograd.losses": "element-wise",
    "minidist.nn.optim": "element-wise",
    "minidist.autograd.operators": "copies",
    "minidist.autograd.tensor": "copies",
}
PARTS = "products", "element-wise", "copies"


def step_parts(step: Callable, tiny: Callable, rounds: int = 5) -> dict[str, float]:
    """Return {part: seconds} of a step, medians of the rounds."""
    python = median_seconds(tiny, repeats=rounds, clock=CoreClock())
    step()
    full, empty = zip(
        *[(seconds_by_part(step), seconds_by_part(tiny)) for _ in range(rounds)], strict=True
    )
    parts = {
        part: max(0.0, median(t[part] for t in full) - median(t[part] for t in empty))
        for part in PARTS
    }
    return parts | {"Python": python}


def seconds_by_part(call: Callable, now: Callable[[], float] = thread_time) -> dict[str, float]:
    """Return the seconds of a call by part; a function's time is without that of its callees."""
    spent, stack = dict.fromkeys(PARTS, 0.0), ["copies"]
    since = now()

    def watch(frame, event, result) -> None:
        nonlocal since
        if event == "call":
            spent[stack[-1]] += now() - since
            stack.append(_part(frame, stack[-1]))
            since = now()
        elif event == "return" and len(stack) > 1:
            spent[stack.pop()] += now() - since
            since = now()

    watched(call, watch)
    return spent


def _part(frame: FrameType, caller: str) -> str:
    if multiplies(frame):
        return "products"
    name = frame.f_globals.get("__name__", "")
    return next((part for room, part in ROOMS.items() if name.startswith(room)), caller)
