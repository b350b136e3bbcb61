"""Products of eight-bit numbers: a scale for each strip of 128, sums in float32.

DeepSeek-V3 technical report (2024), section 3.3.2. The sum of a product is cut into strips of 128
elements. A strip of a factor has a scale s = max |x| / the format's largest (448 in E4M3), so that
its largest element just fits. (Lesson 18 multiplies by its scale: 1 / s, down to a power of two.)

    X = s Q:   Y[n, m] = sum over strips of (Q_a[n, 128] Q_b[128, m]) s_a[n, 1] s_b[1, m]

    X, dY       a scale per strip of 1 x 128, in Y = X W and dX = dY W^T
    W           a scale per block of 128 x 128, which is right for W and for W^T
    X^T, dY^T   in dW = X^T dY: strips of 128 positions, which end where an example ends

A strip's sum is *promoted*: scaled, and added up in float32. (The report's tensor cores keep about
14 bits of a sum.) Gradients have E5M2's range here (Micikevicius et al. 2022); the report takes
E4M3 for them, too: EightBits(gradient=E4M3). With block=None an array has one scale.

This is an emulation, and it is exact: Q is in the wider array of X, so the product of two of its
numbers is what eight-bit hardware multiplies, and a strip's sum is a sum in float32 (float64 for a
model of float64). No memory and no time is saved. A kept X would take 1 + 4/128 bytes an element.
"""

from typing import NamedTuple

import numpy as np

from minidist.autograd.deferred import Gradient
from minidist.autograd.number_format import EightBits
from minidist.autograd.tensor import Function
from minidist.backend import Array, Format, array_module, rounded, widen
from minidist.errors import WrongInput


class Factor(NamedTuple):
    """Rows X[n, K] of a product, to be summed over K.

    side  how many rows share a scale: 1 or, of a weight, the block
    """

    x: Array
    form: Format
    side: int = 1


def product(a: Factor, b: Factor, bits: EightBits, strips: list[slice]) -> Array:
    """Return Y[n, m] = A[n, K] B[m, K]^T of eight-bit numbers, in the dtype of A."""
    y = array_module(a.x).zeros((len(a.x), len(b.x)), a.x.dtype)
    for strip in strips:
        (p, s), (q, t) = quantised(a, strip, bits), quantised(b, strip, bits)
        y += (p @ q.T) * (s * t.T)
    return y


def quantised(factor: Factor, strip: slice, bits: EightBits) -> tuple[Array, Array]:
    """Return (Q[n, k], s[n, 1]) of a strip, X = s Q: Q in the format, its largest number fits."""
    x = factor.x[:, strip]
    scale = scales(x, factor, bits)
    return rounded(x / scale, factor.form), scale


def scales(x: Array, factor: Factor, bits: EightBits) -> Array:
    """Return s[n, 1] of a strip X[n, k]: the largest of each `side` rows, over the format's."""
    xp, n = array_module(x), len(x)
    most = abs(x).max(axis=1) if x.size else xp.zeros(n, x.dtype)
    if bits.block is None:
        most = xp.broadcast_to(bits.share(xp.append(most, most.dtype.type(0)).max()), (n,))
    elif factor.side > 1:
        blocks = [most[rows] for rows in strips_of(n, factor.side)]
        most = xp.concatenate([xp.broadcast_to(block.max(), block.shape) for block in blocks])
    least = np.finfo(x.dtype).tiny  # what is 0 stays 0
    return xp.maximum(most / factor.form.largest, least)[:, None]


def strips_of(length: int, block: int | None, examples: int = 1) -> list[slice]:
    """Return runs of `block` neighbours of `examples` times `length`; none crosses an example."""
    if block is None:
        return [slice(0, examples * length)]
    return [
        slice(first, min(first + block, end))
        for end in range(length, examples * length + 1, length or 1)
        for first in range(end - length, end, block)
    ]


class LinearInEightBits(Function):
    """Linear of functions.py, with three products of eight-bit numbers.

    Y = X W + b  =>  dX = dY W^T, dW = X^T dY, db = sum of dY over rows.
    X[..., T, C_in]: an example has T positions; X[R, C_in] is one of R.
    """

    def __init__(self, bits: EightBits, transposed: bool = False):
        self.bits, self.transposed = bits, transposed

    def forward(self, x: Array, w: Array, b: Array | None = None) -> Array:
        w = w.T if self.transposed else w
        if x.shape[-1:] != w.shape[:1]:
            raise WrongInput(
                f"linear: input {list(x.shape)} needs {w.shape[0]} columns, the rows of its weight"
            )
        bits, self.shape, self.dtype = self.bits, x.shape, x.dtype
        self.x, self.w = widen(x.reshape(-1, w.shape[0])), widen(w)
        factors = Factor(self.x, bits.forward), Factor(self.w.T, bits.forward, bits.block or 1)
        y = product(*factors, bits, strips_of(len(w), bits.block))
        y = y if b is None else y + b
        return y.reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        bits, x, w, dtype, turned = self.bits, self.x, self.w, self.dtype, self.transposed
        rows, form = widen(grad.reshape(-1, w.shape[1])), bits.gradient
        positions = self.shape[-2] if len(self.shape) > 1 else 1
        strips = strips_of(positions, bits.block, len(x) // (positions or 1))
        dx = None
        if self.inputs[0] is not None:
            factors = Factor(rows, form), Factor(w, bits.forward, bits.block or 1)
            dx = product(*factors, bits, strips_of(w.shape[1], bits.block))
            dx = dx.reshape(self.shape).astype(dtype, copy=False)

        def dw(out=None):
            y = product(Factor(x.T, bits.forward), Factor(rows.T, form), bits, strips)
            return (y.T if turned else y).astype(dtype, copy=False)

        def db(out=None):
            return rows.sum(axis=0).astype(dtype, copy=False)

        return (dx, dw, db)[: len(self.inputs)]
