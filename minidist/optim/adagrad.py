"""Adagrad: every element has a learning rate of its own, which falls."""

import numpy as np

from minidist.autograd.kernels import rules
from minidist.backend import on_gpu
from minidist.nn import Parameter
from minidist.optim.optimizer import Optimizer


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
