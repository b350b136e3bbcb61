"""Dropout: a GPU hashes each element of the mask where it uses it; the host has the same mask."""

import math
from collections.abc import Callable

import numpy as np

from minidist.autograd.kernels.launch import Elementwise
from minidist.backend import Array, on_device_of, on_gpu, widen
from minidist.errors import WrongInput
from minidist.pieces import Positions
from minidist.rng import Randomness

# rng.hash_uniform(key, counter) >= rate in integers: threshold = rate 2^53.
_dropout = Elementwise(
    "dropout",
    "T x, raw int64 examples, uint64 key, uint64 threshold, uint64 first, uint64 whole, "
    "int64 part, int64 head, int64 jump, T factor",
    "T y",
    """
    long long at = i % part;
    at += at < head ? 0 : jump;
    unsigned long long z = examples[i / part] * whole + first + at;
    z = z * 0x9E3779B97F4A7C15ULL + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z = (z ^ (z >> 31)) >> 11;
    y = x * T(z >= threshold) * factor""",
)


def dropout(
    x: Array, rate: float, name: str, randomness: Randomness, window=None, full_shape=None
) -> Callable[[Array], Array]:
    """Return the function X -> X keep / (1 - rate) of arrays X[B, ...]; it is its own adjoint.

    The mask and the arguments after x are those of `Randomness.keep`. On a GPU the mask is hashed
    in each call, and is never in memory; the host sends only the indices of the examples, once.

    ValueError, on a GPU, for a window whose elements are not consecutive, and for positions of more
    than two runs.
    """
    factor = 1 / (1 - float(rate))
    if not on_gpu(x):
        keep = randomness.keep(name, rate, x.shape, window, full_shape)
        return lambda x: (widen(x) * keep * x.dtype.type(factor)).astype(x.dtype, copy=False)
    held = randomness.held(window, full_shape)
    full_shape, part = randomness.full_shape(x.shape, full_shape), math.prod(x.shape[1:])
    if held is None:
        first, head, jump = first_of(full_shape, window, part), part, 0
    else:
        first, head, jump = runs_of(held, math.prod(full_shape[1:]))
    numbers = randomness.key(name), math.ceil(rate * 2**53), first, math.prod(full_shape)
    settings = (
        examples_beside(randomness, x),
        *map(np.uint64, numbers),
        part,
        head,
        jump,
        float(x.dtype.type(factor)),
    )
    return lambda x: _dropout(widen(x), *settings).astype(x.dtype, copy=False)


def examples_beside(randomness: Randomness, x: Array) -> Array:
    """Return the indices of the examples on the GPU of x; only the first call copies them."""
    device = x.device.id
    if device not in randomness.copies:
        randomness.copies[device] = on_device_of(np.asarray(randomness.examples, np.int64), x)
    return randomness.copies[device]


def runs_of(positions: Positions, row: int) -> tuple[int, int, int]:
    """Return where two runs of rows of `row` elements begin, how long the first is, and the gap."""
    if len(positions.runs) > 2:
        raise WrongInput(
            f"dropout on a GPU takes positions in two runs at most, not {len(positions.runs)}"
        )
    (a, b), (c, _) = (*positions.runs, (0, 0), (0, 0))[:2]
    return a * row, (b - a) * row, (c - b) * row


def first_of(full_shape: tuple[int, ...], window, part: int) -> int:
    """Return where a window of `part` consecutive elements begins in an array of this shape.

    ValueError if they are not consecutive.
    """
    first = last = 0
    for side, cut in zip(full_shape, window or [slice(None)] * len(full_shape), strict=True):
        begin, end, _ = cut.indices(side)
        first, last = first * side + begin, last * side + max(begin, end - 1)
    if part and last - first + 1 != part:
        raise WrongInput(
            f"a window of dropout on a GPU has consecutive elements of each example "
            f"{list(full_shape)}; cut its first axis alone"
        )
    return first
