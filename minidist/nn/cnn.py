"""Convolution (LeCun et al. 1989), pooling, and a small residual network of them (He et al. 2016).

The network has batch norms, and average pooling where images become smaller and at its end.
"""

import math

from minidist.autograd import Tensor, functions
from minidist.autograd.convolution import convolution
from minidist.backend import Array
from minidist.errors import WrongInput, check_sizes
from minidist.nn.linear import ACTIVATIONS, GAINS, Linear, check_activation
from minidist.nn.module import Module, Sequential, constant, draw
from minidist.nn.norms import BatchNorm
from minidist.rng import Randomness


class Conv2d(Module):
    """Y[B, C_out, H', W'] = activation(X[B, C_in, H, W] * W[C_out, C_in, K, K] + b[C_out]).

    H' = (H + 2 padding - K) // stride + 1, W' = (W + 2 padding - K) // stride + 1; K is `kernel`,
    `padding` the number of zeros around an image. The weight is normal with variance
    gain^2 / (C_in K K): see nn.Linear.

    >>> nn.Conv2d(3, 5, 3, stride=2, padding=1, dtype="float64")(np.ones((2, 3, 8, 6))).shape
    (2, 5, 4, 3)
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        bias=True,
        activation="identity",
        *,
        name="conv",
        seed=0,
        dtype="float32",
    ):
        check_activation(activation)
        check_sizes(channels_in=channels_in, channels_out=channels_out)
        check_sizes(kernel=kernel, stride=stride)
        check_sizes(least=0, padding=padding)
        self.stride, self.padding, self.activation = stride, padding, activation
        shape = (channels_out, channels_in, kernel, kernel)
        scale = GAINS[activation] / math.sqrt(channels_in * kernel * kernel)
        self.weight = draw(f"{name}.weight", shape, scale, seed, dtype)
        self.bias = constant(f"{name}.bias", (channels_out,), 0, dtype) if bias else None

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = convolution(x, self.weight, self.bias, self.stride, self.padding)
        return ACTIVATIONS[self.activation](y)


class AveragePool(Module):
    """Y[B, C, H/k, W/k] = the mean of each square of k x k pixels of X[B, C, H, W].

    k    divides H and W, or ValueError; None: the mean of each whole image, Y[B, C]

    >>> nn.AveragePool(2)(Tensor([[[[1.0, 3.0], [5.0, 7.0]]]])).data.tolist()
    [[[[4.0]]]]
    """

    def __init__(self, k: int | None = None):
        if k is not None:
            check_sizes(k=k)
        self.k = k

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, C, H, W = x.shape
        k = self.k
        if k is None:
            return x.reshape(B, C, H * W).mean(axis=-1)
        if H % k or W % k:
            raise WrongInput(
                f"cannot cut images of {H} x {W} into squares of {k} x {k}; use a k that divides "
                "both"
            )
        return x.reshape(B, C, H // k, k, W // k, k).mean(axis=(3, 5))


class ConvNorm(Module):
    """Y[B, F, H/s, W/s] = norm(conv(X[B, C, H, W])), windows of k x k, stride s; no bias.

    The norm subtracts every channel's mean, and with it a bias. s divides H and W if k is odd.
    """

    def __init__(self, channels_in, channels_out, k=3, stride=1, *, name, seed=0, dtype="float32"):
        options = {"bias": False, "name": f"{name}.conv", "seed": seed, "dtype": dtype}
        self.conv = Conv2d(channels_in, channels_out, k, stride, padding=k // 2, **options)
        self.norm = BatchNorm(channels_out, name=f"{name}.norm", dtype=dtype)

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        return self.norm(self.conv(x))


class Stem(Module):
    """Y[B, F, H, W] = relu(norm(conv(X[B, C, H, W])))."""

    def __init__(self, channels_in, channels_out, *, name="stem", seed=0, dtype="float32"):
        self.first = ConvNorm(channels_in, channels_out, name=name, seed=seed, dtype=dtype)

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        return functions.relu(self.first(x))


class ConvBlock(Module):
    """Y = relu(X' + norm(conv(relu(norm(conv(X)))))): He et al. 2016, figure 2.

    With as many channels out as in, X' = X. Otherwise Y[B, F, H/2, W/2] has half the rows and
    columns of X[B, C, H, W], and X' is X, pooled, under a convolution of 1 x 1.
    """

    def __init__(self, channels_in, channels_out, *, name="block", seed=0, dtype="float32"):
        options, grows = {"seed": seed, "dtype": dtype}, channels_in != channels_out
        stride = 2 if grows else 1
        self.first = ConvNorm(
            channels_in, channels_out, stride=stride, name=f"{name}.first", **options
        )
        self.second = ConvNorm(channels_out, channels_out, name=f"{name}.second", **options)
        self.pool = self.skip = None
        if grows:
            self.pool = AveragePool(stride)
            self.skip = ConvNorm(channels_in, channels_out, 1, name=f"{name}.skip", **options)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = self.second(functions.relu(self.first(x)))
        return functions.relu(y + (x if self.skip is None else self.skip(self.pool(x))))


class PooledHead(Module):
    """logits[B, classes] = mean of each image X[B, C, H, W], times W[C, classes], plus b."""

    def __init__(self, channels, classes, *, name="head", seed=0, dtype="float32"):
        self.pool = AveragePool()
        self.linear = Linear(channels, classes, name=name, seed=seed, dtype=dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return self.linear(self.pool(x))


class CNN(Sequential):
    """images[B, C, H, W] -> logits[B, classes].  Layers: stem, residual blocks, head.

    It has batch norms. So where ranks split the batch, call data_parallel/sync_batch_norm.py first,
    and sum the gradients by `all_reduce_gradients`: running statistics are parameters without one.

    widths   channels of the blocks, one number each; the stem has as many as the first. Where the
             number changes, H and W halve, and must be even

    >>> model = nn.CNN(3, classes=10, widths=(4, 8), dtype="float64")
    >>> model(np.random.default_rng(0).random((2, 3, 8, 8))).shape
    (2, 10)
    """

    def __init__(self, channels, classes, widths=(16, 32), seed=0, dtype="float32"):
        options = {"seed": seed, "dtype": dtype}
        if not widths:
            raise WrongInput("a CNN has one block or more: give the channels of each as widths")
        blocks = [
            ConvBlock(before, width, name=f"blocks.{i}", **options)
            for i, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
        ]
        stem = Stem(channels, widths[0], **options)
        super().__init__([stem, *blocks, PooledHead(widths[-1], classes, **options)])
