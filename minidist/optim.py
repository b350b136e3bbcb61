"""Optimizers: one elementwise rule over flat vectors, in pieces that stay in the cache.

A parameter without a gradient is treated as one with gradient zero: weight decay and momentum act
on it. (A rank whose shard was empty has no gradient, and its update must not depend on the split.)
"""

import math
from collections.abc import Callable

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.kernels import rules
from minidist.autograd.tensor import tick
from minidist.backend import Array, array_module, beside, on_gpu, widen
from minidist.nn.flat_parameters import flat_slices

# Elements: parameter, gradient and two moments in float32 take 512 KiB of a core's cache.
PIECE = 1 << 15

# The allowed values of each setting: in words, and as a test. With eps = 0, a gradient that has
# always been 0 would move a weight by 0 / 0. True is no number.
SETTINGS: dict[str, tuple[str, Callable]] = {
    "lr": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "momentum": ("a number, at least 0 and below 1", lambda x: 0 <= x < 1),
    "weight_decay": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "betas": (
        "two numbers, each at least 0 and below 1",
        lambda b: all(0 <= x < 1 for x in b) and len(b) == 2,
    ),
    "eps": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "max_norm": ("a number, at least 0", lambda x: x >= 0),
}


def check_setting(name: str, value) -> None:
    words, allows = SETTINGS[name]
    try:
        allowed = bool(allows(value)) and not isinstance(value, bool)
    except (TypeError, ValueError):
        allowed = False
    if not allowed:
        raise ValueError(f"{name} must be {words}, not {value!r}")


class Optimizer:
    """Update `parameters`, in place, by a rule on 1-D arrays.

    The list may be empty, as for a frozen stage.
    State is kept per flat slice, and made at the first step.

    settings  lr, the learning rate, and what else the rule needs. They become attributes, which a
              schedule may change between steps; checked now and at each step (see SETTINGS)
    steps     number of updates done so far
    """

    state_arrays = 0
    loss_scale = 1.0  # by what the gradients are to be multiplied in backward: not at all
    scale = None  # the LossScale that chooses it
    copies: list[Array] | tuple = ()  # float32 copies of the flat slices, see mixed_precision.py

    def __init__(self, parameters: list[Tensor], lr: float, **settings):
        self.parameters = [p for p in parameters if p.requires_grad]
        for p in self.parameters:
            if getattr(p, "elsewhere", None):
                raise ValueError(f"{p.name} cannot be optimized here: {p.elsewhere}")
        self.slices = flat_slices(self.parameters)
        self.homes = list(dict.fromkeys(p.home for p in self.parameters))
        for home in self.homes:
            home.scale = None  # of an optimizer before this one; MixedPrecision sets its own
        self.steps, self.state = 0, None
        vars(self).update(settings, lr=lr)
        self.check_settings()

    def check_settings(self) -> None:
        """Raise ValueError if a setting has a value that the rule cannot take."""
        for name in [name for name in SETTINGS if name in vars(self)]:
            check_setting(name, getattr(self, name))
        for s in self.slices if "eps" in vars(self) else []:
            if self.eps < np.finfo(np.promote_types(s.data.dtype, "float32")).tiny:
                raise ValueError(f"eps={self.eps} is 0 in {s.data.dtype}; use a larger one")
        if self.state and len(self.state[0]) < self.state_arrays:
            raise ValueError(
                f"{type(self).__name__} began with {len(self.state[0])} state arrays and now needs "
                f"{self.state_arrays} (momentum was switched on); make a new optimizer"
            )

    def rule(self, p: Array, g: Array, *state: Array) -> None:
        """Update one piece p of the parameters and its state in place, given its gradient g."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The rule's name."""
        return type(self).__name__

    @property
    def skips_zeros(self) -> bool:
        """Whether the rule does not change an element and its state if the gradient is zero."""
        return False

    def _begin_step(self) -> None:
        self.check_settings()
        for home in self.homes:
            if home.locked:
                raise ValueError(home.locked)
        self.lr = float(self.lr)  # a NumPy scalar would widen every piece to float64
        self._check_device()
        if self.state is None:
            self.state = [
                [array_module(s.data).zeros_like(widen(s.data)) for _ in range(self.state_arrays)]
                for s in self.slices
            ]
        for p in self.parameters:
            p.updated = tick()  # a graph that used it before must not run backward any more
        self.steps += 1

    def _check_device(self) -> None:
        for s, state in zip(self.slices, self.state or (), strict=False):
            if state and on_gpu(state[0]) != on_gpu(s.data):
                raise ValueError(
                    "the model was moved to another device after the optimizer's first step; make "
                    "the optimizer after model.to"
                )

    def step(self, copies: list[Array] | None = None, factor: float = 1.0) -> None:
        """Update all parameters once.

        copies  float32 copies of the flat slices: they are updated, and rounded into the parameters
        factor  of all gradients, applied in float32
        """
        self.collect_gradients()
        self._begin_step()
        for s, wide, state in zip(
            self.slices, copies or [s.data for s in self.slices], self.state, strict=True
        ):
            data, gradient = s.data, s.gradient
            piece = len(data) if on_gpu(data) else PIECE
            for start in range(0, len(data), piece or 1):
                cut = slice(start, start + piece)
                old = wide[cut]
                new = widen(old)  # half precision is updated in float32: 1e-8 is 0 in float16
                g = widen(gradient[cut])
                g = g if factor == 1 else g * factor
                self.rule(new, g, *[array[cut] for array in state])
                if new is not old or copies:
                    data[cut] = new

    def step_at(self, positions: Array, gradient: Array) -> None:
        """Update these elements of the only flat slice; all others have gradient zero.

        The same as `step`, for rules that skip zeros; the work is proportional to these elements.
        """
        if not self.skips_zeros:
            raise ValueError(
                f"{type(self).__name__} changes elements whose gradient is zero, so it cannot "
                "update some alone; use Adagrad, or SGD without momentum and weight decay"
            )
        if len(self.slices) != 1:
            raise ValueError(f"step_at needs one flat slice; this optimizer has {len(self.slices)}")
        self._begin_step()
        data, state = self.slices[0].data, self.state[0]
        positions, gradient = beside(positions, data), beside(gradient, data)
        new, own = widen(data[positions]), [array[positions] for array in state]
        self.rule(new, widen(gradient), *own)
        data[positions] = new
        for array, values in zip(state, own, strict=True):
            array[positions] = values

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def collect_gradients(self) -> None:
        """Write every parameter's gradient into its flat vector."""
        for home in self.homes:
            home.collect_gradients()

    def clip_global_norm(
        self, max_norm: float, sum_squares: Callable[[float], float] | None = None
    ) -> float | Array:
        """Scale all gradients by min(1, max_norm / norm); return norm, the length before.

        On a GPU without `sum_squares` the host does not wait: the norm is a 0-d array of the GPU.

        max_norm     at least 0; with infinity the norm is only measured
        sum_squares  for parameters spread over ranks (`Parameter.spread`): a function that takes
                     this rank's sum of squares and returns the sum over all ranks, each parameter
                     counted once
        """
        check_setting("max_norm", max_norm)
        spread = [p.spread for p in self.parameters if p.spread]
        if sum_squares is None and spread:
            raise ValueError(
                "this rank's norm alone is not the global one: parameters are spread over "
                f"{spread[0]}"
            )
        self.collect_gradients()
        if sum_squares is None and any(on_gpu(s.data) for s in self.slices):
            return self._clip_on_gpu(max_norm)
        squares = float(sum(sum_of_squares(s.gradient) for s in self.slices))
        norm = math.sqrt(squares if sum_squares is None else float(sum_squares(squares)))
        if norm > max_norm:
            for s in self.slices:
                gradient = s.gradient
                gradient *= max_norm / norm
            self._use_buffers()
        return norm

    def _clip_on_gpu(self, max_norm: float) -> Array:
        gradients = [s.gradient for s in self.slices]
        squares = array_module(gradients[0]).empty(len(gradients), np.float64)
        for i, gradient in enumerate(gradients):
            sum_of_squares(gradient, out=squares[i])
        norm = rules.root_of_sum(squares)
        for gradient in gradients:
            rules.clip(norm, max_norm, gradient)
        self._use_buffers()
        return norm

    def _use_buffers(self) -> None:
        for p in self.parameters:
            over, p.grad = p.summed_over, p.grad_buffer
            if over:
                p.note_sum(over)  # a part of a sum is still one


def sum_of_squares(x: Array, out: Array | None = None) -> Array:
    """Return the sum of the squares of a vector in float64; on the host, pieces are added up.

    A piece adds up in its own dtype, which is fast, or in float64 if its sum is too large for that.
    """
    if on_gpu(x):
        return rules.sum_of_squares(widen(x), out=out)
    total = 0.0
    with np.errstate(over="ignore"):
        for start in range(0, len(x), PIECE):
            piece = widen(x[start : start + PIECE])
            square = (piece @ piece).astype(np.float64)
            if square == math.inf:
                piece = piece.astype(np.float64)
                square = piece @ piece
            total += square
    return total


class SGD(Optimizer):
    """g += wd p;  m = mu m + g;  p -= lr m  (heavy ball, Polyak 1964; momentum 0: m = g)."""

    def __init__(
        self,
        parameters: list[Tensor],
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
            numbers = g, self.lr, self.weight_decay
            return (
                rules.sgd(*numbers, p)
                if m is None
                else rules.momentum(*numbers, self.momentum, p, m)
            )
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

    def __init__(self, parameters: list[Tensor], lr: float, eps: float = 1e-10):
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

    m^ = m / (1 - b1^t), v^ likewise (Kingma and Ba 2015, algorithm 1).
    Weight decay, if any, is added to the gradient (L2).
    """

    state_arrays = 2

    def __init__(
        self,
        parameters: list[Tensor],
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
        parameters: list[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def rule(self, p, g, m, v):
        self.moments(p, g, m, v, kept=1 - self.lr * self.weight_decay)
