"""Convolution as a product of matrices: each window of an image is one column.

    Y[b] = W cols(X[b])      W[F, C K K], cols(X[b])[C K K, H' W'], Y[b][F, H' W']

A column holds the C K K numbers that one output position sees. The columns are K K times as large
as the image, so they are made for a few examples at a time, in memory that is used again, and made
again in backward: only X is kept.
Letters: B batch, C and F channels of the input and the output, H x W the input, H' x W' the output.
"""

import math
from collections.abc import Iterator
from itertools import product

from minidist.autograd.deferred import Gradient
from minidist.autograd.products import batched_matmul, sum_dtype
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, into, on_gpu
from minidist.errors import WrongInput, check_sizes

BLOCK = 2**20  # bytes of columns at a time on a CPU, whose cache then holds them
GPU_BLOCK = 2**28  # on a GPU, where each block costs launches


class Convolution(Function):
    """Y[b, f, p, q] = sum_cij W[f, c, i, j] X[b, c, s p + i, s q + j] + b[f], X padded by zeros.

    X[B, C, H, W], W[F, C, K_H, K_W], Y[B, F, H', W'], s the stride.
    dW^T = sum_b cols(X[b]) dY[b]^T  (faster than dW = sum_b dY[b] cols(X[b])^T: longest first);
    cols(dX[b]) = W^T dY[b], added where windows overlap;
    db = sum of dY over all axes but f.

    padding  zeros at each end of the rows and of the columns: a number for both, or two numbers
    """

    def __init__(self, stride: int = 1, padding: int | tuple[int, int] = 0):
        self.stride = stride
        self.padding = padding if isinstance(padding, tuple) else (padding, padding)
        check_sizes(stride=stride)
        for zeros in self.padding:
            check_sizes(least=0, padding=zeros)

    def forward(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        self.windows = windows = Windows(x.shape, w.shape, self.stride, self.padding)
        self.x, self.w = x, w
        empty, rows = array_module(x).empty, w.reshape(len(w), -1)
        y = empty((len(x), len(w), *windows.output), x.dtype)
        buffer = empty((windows.at_once(x), len(w), windows.run), sum_dtype(x))
        for block, columns in windows.columns(x):
            part = buffer[: len(columns)]
            batched_matmul(repeat(rows, len(part)), columns, out=part)
            y[block] = windows.places(part)
        if bias is not None:
            y += bias[:, None, None]
        return y

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        x, w, windows = self.x, self.w, self.windows

        def dw(out=None):
            total = array_module(grad).zeros((w[0].size, len(w)), sum_dtype(grad))
            for block, columns in windows.columns(x):
                rows = windows.spread(grad[block])
                total += batched_matmul(columns, rows.swapaxes(1, 2)).sum(axis=0)
            return into(out, total.T.reshape(w.shape).astype(grad.dtype, copy=False))

        def db(out=None):
            total = grad.sum(axis=(0, 2, 3), dtype=sum_dtype(grad))
            return into(out, total.astype(grad.dtype, copy=False))

        dx = None if self.inputs[0] is None else windows.sum_columns(w, grad)
        return (dx, dw, db)[: len(self.inputs)]


class Windows:
    """Where the windows of images are, and how they become columns and images again.

    A padded image, row after row, is one run of numbers, each row `width` long. What element (i, j)
    of all windows sees is a slice of this run, with the stride as its step: long, so fast to copy.
    It has `width` places per row of windows where only W' are windows. The others are computed, and
    not used: few of them if the stride is 1.

    output  (H', W');  run  H' width places, the last width - W' of them empty
    """

    def __init__(self, image, weight, stride: int, padding: tuple[int, int]):
        if len(image) != 4 or image[1] != weight[1]:
            raise WrongInput(
                f"a convolution with a weight {list(weight)} takes images [B, {weight[1]}, H, W], "
                f"not {list(image)}"
            )
        self.image, self.kernel, self.stride, self.padding = image, weight[2:], stride, padding
        self.padded = tuple(n + 2 * p for n, p in zip(image[2:], padding, strict=True))
        if min(n - k for n, k in zip(self.padded, self.kernel, strict=True)) < 0:
            raise WrongInput(
                f"a window of {weight[2]} x {weight[3]} does not fit into images of {image[2]} x "
                f"{image[3]} with zeros around them: {padding[0]} rows and {padding[1]} columns at "
                "each end; use more padding or a smaller kernel"
            )
        sides = zip(self.padded, self.kernel, strict=True)
        self.output = tuple((n - k) // stride + 1 for n, k in sides)
        self.width = self.padded[1]
        self.run = self.output[0] * self.width
        self.used = self.run - self.width + self.output[1]

    def columns(self, x: Array) -> Iterator[tuple[slice, Array]]:
        """Yield (examples, their columns [b, C K K, run]); the next columns overwrite them."""
        at_once, zeros = self.at_once(x), array_module(x).zeros
        padded = zeros((at_once, self.image[1], *self.padded), x.dtype)
        buffer = zeros((at_once, self.image[1], *self.kernel, self.run), x.dtype)
        for block in blocks(len(x), at_once):
            part = x[block]
            images, columns = padded[: len(part)], buffer[: len(part)]
            self.inner(images)[...] = part
            runs = flat(images)
            for (i, j), seen in self.seen():
                columns[:, :, i, j, : self.used] = runs[..., seen]
            yield block, columns.reshape(len(part), -1, self.run)

    def sum_columns(self, w: Array, grad: Array) -> Array:
        """Return dX[B, C, H, W], given dY[B, F, H', W']."""
        at_once, empty, dtype = self.at_once(grad), array_module(grad).empty, sum_dtype(grad)
        padded = empty((at_once, self.image[1], *self.padded), dtype)
        buffer = empty((at_once, w[0].size, self.run), dtype)
        dx = empty(self.image, grad.dtype)
        rows = w.reshape(len(w), -1).T.copy()  # contiguous rows make a faster product
        for block in blocks(len(grad), at_once):
            part = self.spread(grad[block])
            images, columns = padded[: len(part)], buffer[: len(part)]
            batched_matmul(repeat(rows, len(part)), part, out=columns)
            columns = columns.reshape(len(part), -1, *self.kernel, self.run)
            images[...], runs = 0, flat(images)
            for (i, j), seen in self.seen():
                runs[..., seen] += columns[:, :, i, j, : self.used]
            dx[block] = self.inner(images)
        return dx

    def seen(self) -> Iterator[tuple[tuple[int, int], slice]]:
        """Yield (i, j) and what element (i, j) of all windows sees of a flat image."""
        for i, j in product(*map(range, self.kernel)):
            start = i * self.width + j
            yield (i, j), slice(start, start + self.stride * (self.used - 1) + 1, self.stride)

    def places(self, y: Array) -> Array:
        """Return the view [b, F, H', W'] of Y[b, F, run]: what belongs to windows."""
        return y.reshape(*y.shape[:2], -1, self.width)[..., : self.output[1]]

    def spread(self, y: Array) -> Array:
        """Return Y[b, F, H', W'] as [b, F, run], with zeros between."""
        if self.width == self.output[1]:
            return flat(y)
        runs = array_module(y).zeros((*y.shape[:2], self.run), y.dtype)
        self.places(runs)[...] = y
        return runs

    def inner(self, padded: Array) -> Array:
        """Return the view of padded images that is the images themselves."""
        (p, q), (height, width) = self.padding, self.image[2:]
        return padded[:, :, p : p + height, q : q + width]

    def at_once(self, x: Array) -> int:
        """Return the number of examples whose columns have about BLOCK bytes, 1 or more."""
        each = self.image[1] * math.prod(self.kernel) * self.run * x.itemsize
        return max(1, min(len(x), (GPU_BLOCK if on_gpu(x) else BLOCK) // each))


def flat(images: Array) -> Array:
    """Return [b, C, H, W] as [b, C, H W], a view."""
    return images.reshape(*images.shape[:2], math.prod(images.shape[2:]))


def blocks(examples: int, at_once: int) -> list[slice]:
    return [slice(start, start + at_once) for start in range(0, examples, at_once)]


def repeat(matrix: Array, count: int) -> Array:
    """Return a view [count, ...] of one matrix."""
    return array_module(matrix).broadcast_to(matrix, (count, *matrix.shape))


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> Tensor:
    """Convolve X[B, C, H, W] with W[F, C, K_H, K_W] and add b[F]: see `Convolution`."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return Convolution(stride, padding)(*inputs)
