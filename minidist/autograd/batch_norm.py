"""Batch normalisation (Ioffe and Szegedy 2015): every channel by its mean and variance in a batch.

The statistics are of the whole batch. Where ranks hold parts of it, two sums cross the network, and
nothing else differs: `sum_over_ranks` is where they come from (data_parallel/sync_batch_norm.py).
Letters: B batch, C channels; count: numbers per channel in the whole batch.
"""

import math
from collections.abc import Callable

from minidist.autograd.deferred import Gradient
from minidist.autograd.kernels.softmax import sum_columns, sum_rows
from minidist.autograd.tensor import Function
from minidist.backend import Array, array_module, on_gpu, widen
from minidist.errors import WrongInput

SumOverRanks = Callable[[Array], Array]


class BatchNorm(Function):
    """Y = n g + b, n = (X - mean) r, r = 1 / sqrt(var + eps), per channel of X[B, C, ...].

    dX = g r (dY - mean dY - n mean(dY n)), the means over the batch;  dg = sum dY n,  db = sum dY.
    (Ioffe and Szegedy 2015, section 3: the equations of the transform and of its gradients.)

    fixed           (mean[C], var[C]) to use instead of the batch's; then dX = g r dY
    sum_over_ranks  array -> its sum over the ranks that hold the batch; None: one rank has it all.
                    Then dX is of the whole batch; dg and db are this rank's part of the sum
    After forward, `mean`, `var` and `count` are the statistics of the whole batch.
    """

    def __init__(
        self,
        eps: float = 1e-5,
        fixed: tuple[Array, Array] | None = None,
        sum_over_ranks: SumOverRanks | None = None,
    ):
        self.eps, self.fixed, self.sum_over_ranks = eps, fixed, sum_over_ranks

    def forward(self, x: Array, gain: Array, bias: Array) -> Array:
        if x.ndim < 2 or x.shape[1] != len(gain):
            C = len(gain)
            raise WrongInput(f"batch norm of {C} channels takes [B, {C}, ...], not {list(x.shape)}")
        wide = widen(x)
        if self.fixed is None:
            n = self.center(wide)
        else:
            self.mean, self.var = map(widen, self.fixed)
            n = wide - along(self.mean, x)
        self.r, self.gain = 1 / array_module(x).sqrt(self.var + self.eps), widen(gain)
        n *= along(self.r, x)
        self.n = n
        y = n * along(self.gain, x)
        y += along(widen(bias), x)
        return y.astype(x.dtype, copy=False)

    def center(self, x: Array) -> Array:
        """Return X - mean, and set the statistics of the whole batch."""
        center = sum_per_channel(x) / max(1, count_per_channel(x))  # of this rank's part
        d = x - along(center, x)
        self.mean, self.var, self.count = statistics(center, d, self.sum_over_ranks)
        d -= along((self.mean - center).astype(x.dtype, copy=False), x)
        self.mean, self.var = (a.astype(x.dtype, copy=False) for a in (self.mean, self.var))
        return d

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        wide, n, dtype = widen(grad), self.n, grad.dtype
        xp = array_module(grad)
        sums = xp.stack([sum_per_channel(wide), sum_per_channel(wide * n)])
        dbias, dgain = sums.astype(dtype, copy=False)
        if self.inputs[0] is None:  # on every rank: none waits for a sum
            return None, dgain, dbias
        dx = wide
        if self.fixed is None:
            total = sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)
            mean, slope = (total / self.count).astype(wide.dtype, copy=False)
            dx = wide - along(mean, n)
            dx -= n * along(slope, n)
        dx = dx * along(self.gain * self.r, n)
        return dx.astype(dtype, copy=False), dgain, dbias


def statistics(
    center: Array, d: Array, sum_over_ranks: SumOverRanks | None = None
) -> tuple[Array, Array, float | Array]:
    """Return mean[C], variance[C] (of the batch: divided by count) and count, given D = X - center.

    center[C] is near the mean: about 0, sum X^2 - count mean^2 would have no digits left in float32
    if the variance is 1e-7 of mean^2. The variance is sum D^2 / count - (sum D / count)^2.

    Ranks have different centers, and a sum over ranks needs a common one (Chan, Golub, LeVeque 1979
    merge two parts of a sample; here there are N). It is 0: (count, sum X, sum X^2), 2 C + 1
    numbers, are computed from center and D, and travel in float64, which loses 1e-16 of mean^2. A
    rank without examples adds zeros.

    ValueError if count < 2; not on a GPU, since the host would wait for it. There the running
    variance stays as it is.
    """
    count, rest, squares = count_per_channel(d), sum_per_channel(d), sum_per_channel(d * d)
    if sum_over_ranks is not None:
        xp, m = array_module(d), center.astype("float64")
        sums = [xp.full(1, count, "float64"), count * m + rest]
        sums.append(squares + m * (2 * rest + count * m))
        total = sum_over_ranks(xp.concatenate(sums))
        count, center = total[0], 0
        rest, squares = total[1:].reshape(2, -1)
    if not on_gpu(count) and count < 2:
        raise WrongInput(
            f"batch norm has {count:g} numbers per channel to train with, and needs 2 or more; "
            "use a larger batch, or model.eval() for the running statistics"
        )
    rest = rest / count
    return center + rest, array_module(d).maximum(squares / count - rest * rest, 0), count


def count_per_channel(x: Array) -> int:
    return len(x) * math.prod(x.shape[2:])


def sum_per_channel(x: Array) -> Array:
    """Sum X[B, C, ...] over all axes but C."""
    if x.ndim == 2:
        return sum_rows(x)
    rows = sum_columns(x.reshape(*x.shape[:2], math.prod(x.shape[2:])))
    return rows.reshape(x.shape[:2]).sum(axis=0)


def along(channels: Array, x: Array) -> Array:
    """Return values[C] in a shape that broadcasts to X[B, C, ...]."""
    return channels.reshape(-1, *[1] * (x.ndim - 2))
