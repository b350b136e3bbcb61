"""Stochastic gradient descent, with momentum and weight decay if they are not zero."""

from minidist.autograd.kernels import rules
from minidist.backend import on_gpu
from minidist.nn import Parameter
from minidist.optim.optimizer import Optimizer


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
