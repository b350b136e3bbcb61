"""Norms: layer norm (Ba et al. 2016), RMS norm (Zhang and Sennrich 2019), batch norm.

Batch normalisation is by Ioffe and Szegedy (2015).
"""

import math
from collections.abc import Sequence

from minidist.autograd import Tensor, functions
from minidist.autograd import batch_norm as statistics
from minidist.autograd.recording import is_recording
from minidist.backend import array_module
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


class BatchNorm(Module):
    """Y = (X - mean) / sqrt(var + eps) * gain[C] + bias[C], per channel of X[B, C, ...].

    The axes after C are the places of an example, such as H and W of an image; there may be none.

    Mean and variance are the batch's in training, and the running ones after `eval()`. They
    make the examples of a batch depend on each other: a strategy that splits a batch gives another
    gradient, unless it sums the statistics over ranks (data_parallel/sync_batch_norm.py).

    running_mean, running_var  frozen parameters; each forward pass that trains and records moves
                     them by `momentum` of the difference to the batch's mean and its unbiased
                     variance, divided by count - 1. A channel whose mean or variance is not finite
                     moves nothing: its running value would stay inf or nan in all later steps
    sum_over_ranks   see autograd.batch_norm.BatchNorm; None: the batch is whole
    ranks            which those are, in the world (see parallel/statistics.py)

    >>> nn.BatchNorm(1, dtype="float64")(np.array([[1.0], [3.0]])).data.round(3).tolist()
    [[-1.0], [1.0]]
    """

    training = True
    sum_over_ranks: statistics.SumOverRanks | None = None
    ranks: Sequence[int] = ()

    def __init__(self, channels: int, eps=1e-5, momentum=0.1, *, name="norm", dtype="float32"):
        check_sizes(channels=channels)
        check_number("eps is a positive number", eps, lambda x: 0 < x < math.inf)
        check_number("momentum is a number from 0 to 1", momentum, lambda x: 0 <= x <= 1)
        self.eps, self.momentum, self.name = eps, momentum, name
        self.gain = constant(f"{name}.gain", (channels,), 1, dtype)
        self.bias = constant(f"{name}.bias", (channels,), 0, dtype)
        self.running_mean = constant(f"{name}.running_mean", (channels,), 0, dtype)
        self.running_var = constant(f"{name}.running_var", (channels,), 1, dtype)
        for running in (self.running_mean, self.running_var):
            running.requires_grad = False

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        if not self.training:
            fixed = self.running_mean.data, self.running_var.data
            return statistics.BatchNorm(self.eps, fixed)(x, self.gain, self.bias)
        function = statistics.BatchNorm(self.eps, sum_over_ranks=self.sum_over_ranks)
        y = function(x, self.gain, self.bias)
        if is_recording():  # a pass that is computed again moves them once
            count = function.count
            mean, var = function.mean, function.var * (count / (count - 1))
            xp = array_module(mean)
            finite = xp.isfinite(mean) & xp.isfinite(var)
            for running, value in (self.running_mean, mean), (self.running_var, var):
                running.data += self.momentum * xp.where(finite, value - running.data, 0)
        return y
