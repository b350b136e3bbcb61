"""Losses: a sum over targets, divided by `reduction_size`.

Pass the number of targets of the whole optimizer update, over all ranks and micro-batches, as
`reduction_size`. Then gradients of parts only have to be summed: the sum is the gradient of the
mean over all targets, even if parts are uneven or empty. The default is the number of targets
passed: the loss is then their mean, right for one device and one batch.

A target that is IGNORED, as the padding of short sentences is, has the loss 0 and the gradient 0
and does not count: "the number of targets" is `counted(targets)`. Ranks whose examples have more
padding count fewer targets. So a mean over ranks of means over their own targets is wrong, even
where all have as many examples.

The loss of float16 is float32, and so is the gradient that enters it: a loss scale may be large.
"""

import math

from minidist.autograd.checks import check_indices
from minidist.autograd.kernels import softmax
from minidist.autograd.kernels.softmax import sum_columns
from minidist.autograd.tensor import Function, Tensor
from minidist.backend import Array, array_module, as_array, on_device_of, on_gpu, widen
from minidist.errors import WrongInput

IGNORED = -1  # a target that does not count


def counted(targets: Array) -> int:
    """Return the number of targets that count: of integers all but IGNORED, of other ones all.

    Of an array on a GPU this waits for the GPU, except of unsigned integers: all of them count.
    """
    targets = values_of(targets)
    return int((targets != IGNORED).sum()) if targets.dtype.kind == "i" else targets.size


def values_of(targets: Tensor | Array) -> Array:
    return as_array(targets.data if isinstance(targets, Tensor) else targets)


class CrossEntropy(Function):
    """L = sum of -log softmax(X)[target] / n  =>  dX = (softmax(X) - onehot) dL / n; X[..., V].

    Where the target is IGNORED both are 0.
    """

    def __init__(self, targets: Array, reduction_size: float | Array):
        self.targets = targets
        self.reduction_size: Array = reduction_size

    def forward(self, logits: Array) -> Array:
        self.shape, self.dtype = logits.shape, logits.dtype
        xp, rows = array_module(logits), widen(logits).reshape(-1, logits.shape[-1])
        targets = on_device_of(self.targets.reshape(-1), logits)
        if on_gpu(logits):
            loss, self.saved = softmax.cross_entropy(rows, targets, self.reduction_size)
            return loss
        shifted = rows - rows.max(axis=-1, keepdims=True)
        self.picked = (xp.arange(len(rows)), targets)
        picked = shifted[self.picked]
        self.probabilities = xp.exp(shifted, out=shifted)
        sums = sum_columns(self.probabilities)
        self.probabilities /= sums
        losses = xp.log(sums[:, 0]) - picked
        losses[targets == IGNORED] = 0
        return losses.sum() / self.reduction_size

    def backward(self, grad: Array) -> Array:
        if on_gpu(grad):
            dx = softmax.cross_entropy_backward(grad, self.saved)
        else:
            dx = self.probabilities
            dx[self.picked] -= 1
            dx[self.picked[1] == IGNORED] = 0
            dx *= grad / self.reduction_size
        return dx.reshape(self.shape).astype(self.dtype, copy=False)


class SquaredError(Function):
    """L = sum of (Y - T)^2 / n  =>  dY = 2 (Y - T) dL / n."""

    def __init__(self, targets: Array, reduction_size: float):
        self.targets = targets
        self.reduction_size: Array = reduction_size

    def forward(self, y: Array) -> Array:
        self.difference = y - on_device_of(self.targets, y)
        return (widen(self.difference) ** 2).sum() / self.reduction_size

    def backward(self, grad: Array) -> Array:
        dy = widen(self.difference) * (2 * grad / self.reduction_size)
        return dy.astype(self.difference.dtype, copy=False)


class ScaleGradient(Function):
    """Y = X  =>  dX = s dY: the gradient of s times the loss, while the loss stays as it is."""

    def __init__(self, scale: float):
        self.scale = scale

    def forward(self, x: Array) -> Array:
        return x

    def backward(self, grad: Array) -> Array:
        return grad * self.scale


def cross_entropy(
    logits: Tensor, targets: Tensor | Array, reduction_size: float | None = None
) -> Tensor:
    """Sum -log softmax(logits[..., V])[targets[...]]; divide by `reduction_size`.

    By default that is the number of targets that count: those that are not IGNORED. ValueError if
    a target on the host is neither IGNORED nor in [0, V), or if none counts and no size is given.
    Targets on a GPU are counted there, without waiting: if none counts, the loss is 0.
    """
    values, domain = values_of(targets), "the {} classes of the logits"
    targets = check_indices(values, "target", logits.shape[-1], logits.data, domain, first=IGNORED)
    if targets.shape != logits.shape[:-1]:
        raise WrongInput(
            f"logits {list(logits.shape)} need targets {list(logits.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    size = reduction_size_or(targets if on_gpu(values) else values, reduction_size)
    return CrossEntropy(targets, size)(logits)


def squared_error(
    outputs: Tensor, targets: Tensor | Array, reduction_size: float | None = None
) -> Tensor:
    """Sum (outputs - targets)^2; divide by `reduction_size`.

    By default that is the number of targets. Targets that require a gradient get one, too.
    """
    values = values_of(targets)
    if values.shape != outputs.shape or values.dtype != outputs.dtype:
        raise WrongInput(
            f"outputs are {outputs.dtype}{list(outputs.shape)}, "
            f"targets {values.dtype}{list(values.shape)}: they must agree"
        )
    size = reduction_size_or(values, reduction_size)
    if isinstance(targets, Tensor) and targets.requires_grad:
        outputs, values = outputs - targets, array_module(values).zeros_like(values)
    return SquaredError(values, size)(outputs)


def scaled(loss: Tensor, scale: float) -> Tensor:
    """Return the loss, which leaves `scale` times its gradient in backward (loss scaling)."""
    return loss if scale == 1 else ScaleGradient(float(scale))(loss)


def reduction_size_or(targets: Array, size: float | None) -> float | Array:
    """Return the reduction size, by default the number of targets that count."""
    if size is None and on_gpu(targets) and targets.dtype.kind == "i":
        return (targets != IGNORED).sum()  # it stays there: to look at it would wait for the GPU
    if size is None and not (size := counted(targets)):
        raise WrongInput(
            f"none of {targets.size} targets counts: a part of a batch without any needs "
            "reduction_size=, the number of targets that count in the whole batch"
        )
    if not 0 < size < math.inf:
        raise WrongInput(
            f"reduction_size must be positive, not {size}: it is the number of targets "
            "that count in the whole batch, which needs at least one"
        )
    return float(size)
