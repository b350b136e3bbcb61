"""Root mean square layer normalisation (Zhang and Sennrich 2019)."""

import math

from minidist.autograd import Tensor, functions
from minidist.errors import check_number, check_sizes
from minidist.nn.module import Module, constant
from minidist.rng import Randomness


class RMSNorm(Module):
    """Y[..., C] = X / sqrt(mean of X^2 + eps) * gain[C], the mean over C.

    >>> nn.RMSNorm(2, dtype="float64")(np.array([[3.0, 4.0]])).data.round(3).tolist()
    [[0.849, 1.131]]
    """

    def __init__(self, width: int, eps=1e-5, *, name="norm", dtype="float32"):
        check_sizes(width=width)
        check_number("eps is a positive number", eps, lambda x: 0 < x < math.inf)
        self.eps = eps
        self.gain = constant(f"{name}.gain", (width,), 1, dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return functions.rms_norm(x, self.gain, self.eps)
