"""The functions of Llama's block that GPT's lacks: a norm without a mean, and a gate."""

from minidist.autograd.deferred import Gradient
from minidist.autograd.kernels import mean_columns, sum_rows_of_product
from minidist.autograd.tensor import Function
from minidist.backend import Array, array_module, widen


class RMSNorm(Function):
    """Y = n g, n = X r, r = 1 / sqrt(mean of X^2 + eps), over the last axis.

    Zhang and Sennrich 2019, equation 4: LayerNorm without the mean and without the bias.
    With d = dY g:  dX = r (d - n mean(d n)),  dg = sum dY n.
    """

    def __init__(self, eps: float = 1e-5):
        self.eps = eps

    def forward(self, x: Array, gain: Array) -> Array:
        wide = widen(x)
        self.gain, self.r = gain, 1 / array_module(x).sqrt(mean_columns(wide, wide) + self.eps)
        self.n = wide * self.r
        return (self.n * gain).astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Gradient, ...]:
        n, wide = self.n, widen(grad)
        d = wide * self.gain
        dx = self.r * (d - n * mean_columns(d, n))
        dgain = sum_rows_of_product(wide, n)
        return dx.astype(grad.dtype, copy=False), dgain.astype(grad.dtype, copy=False)


class SwiGLU(Function):
    """[A, B] -> Y = A s B, s = 1 / (1 + exp(-A)); the halves of the last axis are gate and up.

    Shazeer 2020, equation 6: Swish of the gate, times the other product.
    dA = dY B s (1 + A (1 - s)),  dB = dY A s.
    """

    def forward(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        self.a, self.b = widen(x[..., :half]), widen(x[..., half:])
        self.s = (1 + array_module(x).tanh(self.a / 2)) / 2  # exp(-A) may overflow
        return (self.a * self.s * self.b).astype(x.dtype, copy=False)

    def backward(self, grad: Array) -> Array:
        a, b, s, wide = self.a, self.b, self.s, widen(grad)
        da, db = wide * b * s * (1 + a * (1 - s)), wide * a * s
        return array_module(grad).concatenate([da, db], axis=-1).astype(grad.dtype, copy=False)
