"""Layer normalisation (Ba, Kiros, Hinton 2016)."""

import math

from minidist.autograd import Tensor, functions
from minidist.errors import check_number, check_sizes
from minidist.nn.module import Module, constant
from minidist.rng import Randomness


class LayerNorm(Module):
    """Y[..., C] = (X - mean) / sqrt(var + eps) * gain[C] + bias[C], mean and variance over C.

    The variance is the mean square, divided by C. gain is what PyTorch calls weight.

    >>> nn.LayerNorm(2, dtype="float64")(np.array([[1.0, 3.0]])).data.round(3).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(self, width: int, eps=1e-5, *, name="norm", dtype="float32"):
        check_sizes(width=width)
        check_number("eps is a positive number", eps, lambda x: 0 < x < math.inf)
        self.eps = eps
        self.gain = constant(f"{name}.gain", (width,), 1, dtype)
        self.bias = constant(f"{name}.bias", (width,), 0, dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return functions.layer_norm(x, self.gain, self.bias, self.eps)
