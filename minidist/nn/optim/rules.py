"""The rules: SGD, Adagrad, Adam, and AdamW, which decays weights beside the gradient."""

import math

import numpy as np

from minidist.autograd.kernels import rules
from minidist.backend import on_gpu
from minidist.nn import Parameter
from minidist.nn.optim.optimizer import Optimizer


class SGD(Optimizer):
    """g += wd p;  m = mu m + g;  p -= lr m  (heavy ball, Polyak 1964; momentum 0: m = g)."""

    momentum: float
    weight_decay: float

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, lr, momentum=momentum, weight_decay=weight_decay)

    @property
    def state_arrays(self) -> int:
        return 1 if self.momentum else 0

    @property
    def skips_zeros(self) -> bool:
        return not self.momentum and not self.weight_decay

    def rule(self, p, g, m=None):
        if on_gpu(p):
            if m is None:
                return rules.sgd(g, self.lr, self.weight_decay, p)
            return rules.momentum(g, self.lr, self.weight_decay, self.momentum, p, m)
        if self.weight_decay:
            g = g + self.weight_decay * p
        if m is not None:
            m *= self.momentum
            m += g
            g = m
        p -= self.lr * g


class Adagrad(Optimizer):
    """a += g^2;  p -= lr g / (sqrt a + eps)  (Duchi, Hazan, Singer 2011; diagonal).

    Each element has its own rate, which falls with the gradients it has seen; elements that are
    rarely touched keep a large rate. The eps, their delta (figure 1), makes 0 / 0 equal 0.
    """

    state_arrays = 1
    eps: float

    def __init__(self, parameters: list[Parameter], lr: float, eps: float = 1e-10):
        super().__init__(parameters, lr, eps=eps)

    @property
    def skips_zeros(self) -> bool:
        return True

    def rule(self, p, g, a):
        if on_gpu(p):
            return rules.adagrad(g, self.lr, self.eps, p, a)
        a += g * g
        p -= self.lr * (g / (np.sqrt(a) + self.eps))


class Adam(Optimizer):
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p -= lr m^ / (sqrt v^ + eps).

    m^ = m / (1 - b1^t), v^ = v / (1 - b2^t) (Kingma and Ba 2015, algorithm 1).
    Weight decay, if any, is added to the gradient (L2).
    """

    state_arrays = 2
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def rule(self, p, g, m, v):
        self.moments(p, g, m, v, l2=self.weight_decay)

    def moments(self, p, g, m, v, l2=0.0, kept=1.0):
        """p *= kept, then Adam's step with the gradient g + l2 p, p as it was before."""
        b1, b2 = self.betas
        scale, rate = 1 / math.sqrt(1 - b2**self.steps), self.lr / (1 - b1**self.steps)
        if on_gpu(p):
            return rules.adam(g, l2, kept, b1, 1 - b1, b2, 1 - b2, scale, self.eps, rate, p, m, v)
        g = g + l2 * p if l2 else g
        if kept != 1:
            p *= kept
        m *= b1
        m += (1 - b1) * g
        v *= b2
        v += (1 - b2) * (g * g)
        root = np.sqrt(v)
        root *= scale
        root += self.eps
        p -= rate * (m / root)


class AdamW(Adam):
    """Adam, and in addition p -= lr wd p (Loshchilov and Hutter 2019, algorithm 2).

    The decay is lr wd, as in PyTorch; in the paper it is eta_t wd.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def rule(self, p, g, m, v):
        self.moments(p, g, m, v, kept=1 - self.lr * self.weight_decay)
