"""The sum of the squares of gradients, and gradients scaled by their norm on a GPU."""

import math
from collections.abc import Sequence

import numpy as np

from minidist.autograd.kernels import rules
from minidist.backend import Array, array_module, on_gpu, widen

# Elements: parameter, gradient and two moments in float32 take 512 KiB of a core's cache.
PIECE = 1 << 15


def sum_of_squares(x: Array, out: Array | None = None) -> Array:
    """Return the sum of the squares of a vector in float64; on the host, pieces are added up.

    A piece adds up in its own dtype, which is fast, or in float64 if its sum is too large for that.
    """
    if on_gpu(x):
        return rules.sum_of_squares(widen(x), out=out)
    total = 0.0
    with np.errstate(over="ignore"):
        for start in range(0, len(x), PIECE):
            piece = widen(x[start : start + PIECE])
            square = (piece @ piece).astype(np.float64)
            if square == math.inf:
                piece = piece.astype(np.float64)
                square = piece @ piece
            total += square
    return total


def scale_on_gpu(gradients: Sequence[Array], max_norm: float) -> Array:
    """Scale vectors by min(1, max_norm / norm); return the norm. The host does not wait for it."""
    squares = array_module(gradients[0]).empty(len(gradients), np.float64)
    for i, gradient in enumerate(gradients):
        sum_of_squares(gradient, out=squares[i])
    norm = rules.root_of_sum(squares)
    for gradient in gradients:
        rules.clip(norm, max_norm, gradient)
    return norm
