"""A layer of convolutions (LeCun et al. 1989), with an activation after it if one is named."""

import math

from minidist.autograd import Tensor
from minidist.autograd.convolution import convolution
from minidist.errors import check_sizes
from minidist.nn.linear import ACTIVATIONS, GAINS, check_activation
from minidist.nn.module import Module, constant, draw
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
