"""An optimizer: one elementwise rule over flat vectors, in pieces that stay in the cache.

A parameter without a gradient is treated as one with gradient zero: weight decay and momentum act
on it. (A rank whose shard was empty has no gradient, and its update must not depend on the split.)
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from minidist.autograd.kernels import rules
from minidist.autograd.recording import tick
from minidist.backend import (
    Array,
    array_module,
    is_half,
    keep_freed_memory,
    on_device_of,
    on_gpu,
    widen,
)
from minidist.errors import WrongInput
from minidist.nn.flat_parameters import FlatSlice, flat_slices, moved
from minidist.nn.optim.stochastic_rounding import StochasticRounding
from minidist.nn.parameter import Parameter

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
    "times": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "max_norm": ("a number, at least 0", lambda x: x >= 0),
}


def check_setting(name: str, value) -> None:
    values, allows = SETTINGS[name]
    try:
        allowed = bool(allows(value)) and not isinstance(value, bool)
    except (TypeError, ValueError):
        allowed = False
    if not allowed:
        raise WrongInput(f"{name} must be {values}, not {value!r}")


class Optimizer:
    """Update `parameters`, in place, by a rule on 1-D arrays.

    The list may be empty, as for a frozen stage.
    State is kept per flat slice, and made at the first step.

    settings  lr, the learning rate, and what else the rule needs. They become attributes, which a
              schedule may change between steps; checked now and at each step (see SETTINGS)
    steps     number of updates done so far
    """

    lr: float
    loss_scale = 1.0  # by what the gradients are to be multiplied in backward: not at all
    scale = None  # the LossScale that chooses it
    copies: list[Array] | tuple = ()  # float32 copies of the flat slices, see mixed_precision.py
    rounding: StochasticRounding | None = None  # of 16-bit weights and state; None: to nearest

    def __init__(self, parameters: list[Parameter], lr: float, **settings):
        keep_freed_memory()
        parameters = list(parameters)
        if wrong := [type(p).__name__ for p in parameters if not isinstance(p, Parameter)]:
            raise WrongInput(
                f"an optimizer takes a list of parameters, as model.parameters(), not {wrong[0]}; "
                "for groups with settings of their own make one optimizer of each"
            )
        self.trains = {p: p.requires_grad for p in parameters}
        self.parameters = [p for p, trains in self.trains.items() if trains]
        for p in self.parameters:
            if where := p.placement.elsewhere:
                raise WrongInput(f"{p.name} cannot be optimized here: {where}")
        self.slices = flat_slices(self.parameters)
        self.homes = list(dict.fromkeys(s.home for s in self.slices))
        for home in self.homes:
            home.scale = None  # of an optimizer before this one; MixedPrecision sets its own
        self.steps = 0
        self.state: list[list[Array]] | None = None
        vars(self).update(settings, lr=lr)
        self.check_settings()

    def check_settings(self) -> None:
        """Raise ValueError if a setting has a value that the rule cannot take."""
        for name in [name for name in SETTINGS if name in vars(self)]:
            check_setting(name, getattr(self, name))
        eps = vars(self).get("eps", math.inf)
        for s in self.slices:
            if eps < np.finfo(np.promote_types(s.data.dtype, "float32")).tiny:
                raise WrongInput(f"eps={eps} is 0 in {s.data.dtype}; use a larger one")
            if self.rounding and s.data.size and not is_half(s.data.dtype):
                raise WrongInput(
                    f"stochastic rounding is for weights of 16 bits, not {s.data.dtype}; call "
                    "model.astype first, or leave it out"
                )
        for s, arrays in zip(self.slices, self.state or [], strict=False):
            if len(arrays) < self.arrays_for(s):
                raise WrongInput(
                    f"{type(self).__name__} began with {len(arrays)} state arrays and now needs "
                    f"{self.arrays_for(s)} (momentum was switched on); make a new optimizer"
                )

    def rule(self, p: Array, g: Array, *state: Array) -> None:
        """Update one piece p of the parameters and its state in place, given its gradient g."""
        raise NotImplementedError

    @property
    def state_arrays(self) -> int:
        """How many arrays of state the rule keeps, each of the parameters' shape."""
        return 0

    def arrays_for(self, s: FlatSlice) -> int:
        """Return the number of state arrays that a flat slice has, from the first one on."""
        return self.state_arrays

    def directions(self, factor: float) -> list[tuple[Array, float]]:
        """Return of each flat slice what the rule takes as its gradient, and what multiplies it."""
        return [(s.gradient, factor) for s in self.slices]

    @property
    def kind(self) -> str:
        """The rule's name."""
        return type(self).__name__

    @property
    def skips_zeros(self) -> bool:
        """Whether the rule does not change an element and its state if the gradient is zero."""
        return False

    def _begin_step(self) -> list[list[Array]]:
        """Check what may have changed since the last step; return the state of each flat slice."""
        self.check_settings()
        for home in self.homes:
            if home.locked:
                raise WrongInput(home.locked)
        for p, trains in self.trains.items():
            if p.requires_grad != trains:
                raise moved(p.name)
        self.lr = float(self.lr)  # a NumPy scalar would widen every piece to float64
        self._check_device()
        if self.state is None:
            self.state = [
                [array_module(like).zeros_like(like) for _ in range(self.arrays_for(s))]
                for s, like in zip(self.slices, map(self.state_like, self.slices), strict=True)
            ]
        for p in self.parameters:
            p.updated = tick()  # a graph that used it before must not run backward any more
        self.steps += 1
        return self.state

    def _check_device(self) -> None:
        if self.state is None:
            return
        for s, state in zip(self.slices, self.state, strict=True):
            if state and on_gpu(state[0]) != on_gpu(s.data):
                raise WrongInput(
                    "the model was moved to another device after the optimizer's first step; make "
                    "the optimizer after model.to"
                )

    def step(self, copies: list[Array] | None = None, factor: float = 1.0) -> None:
        """Update all parameters once.

        copies  float32 copies of the flat slices: they are updated, and rounded into the parameters
        factor  of all gradients, applied in float32
        """
        state_of = self._begin_step()  # first: what it refuses leaves the gradients as they are
        self.collect_gradients()
        wide_of = copies or [s.data for s in self.slices]
        each = zip(self.slices, wide_of, state_of, self.directions(factor), strict=True)
        for s, wide, state, (gradient, by) in each:
            data = s.data
            piece = len(data) if on_gpu(data) else PIECE
            for start in range(0, len(data), piece or 1):
                cut = slice(start, start + piece)
                old = [wide[cut], *[array[cut] for array in state]]
                new = [*map(widen, old)]  # 16 bits are updated in float32: 1e-8 is 0 in float16
                g = widen(gradient[cut])
                g = g if by == 1 else g * by
                self.rule(new[0], g, *new[1:])
                for number, array in enumerate([data, *state]):
                    if new[number] is not old[number] or (copies and array is data):
                        array[cut] = self.round(new[number], s.within(cut), number)

    def state_like(self, s: FlatSlice) -> Array:
        """Return an array of the dtype that a flat slice's state has: float32 for 16-bit weights.

        With stochastic rounding the state has 16 bits, too.
        """
        return s.data if self.rounding else widen(s.data)

    def round(self, new: Array, s: FlatSlice, number: int) -> Array:
        """Return new weights (number 0), or an array of their state, as they are stored."""
        return new if self.rounding is None else self.rounding(new, s, self.steps, number)

    def step_at(self, positions: Array, gradient: Array) -> None:
        """Update these elements of the only flat slice; all others have gradient zero.

        The same as `step`, for rules that skip zeros; the work is proportional to these elements.
        """
        if not self.skips_zeros:
            raise WrongInput(
                f"{type(self).__name__} changes elements whose gradient is zero, so it cannot "
                "update some alone; use Adagrad, or SGD without momentum and weight decay"
            )
        if self.rounding is not None:
            raise WrongInput("step_at rounds to nearest; use step with stochastic rounding")
        if len(self.slices) != 1:
            raise WrongInput(f"step_at needs one flat slice; this optimizer has {len(self.slices)}")
        (state,) = self._begin_step()
        data = self.slices[0].data
        positions, gradient = on_device_of(positions, data), on_device_of(gradient, data)
        weights, states = widen(data[positions]), [array[positions] for array in state]
        self.rule(weights, widen(gradient), *states)
        data[positions] = weights
        for array, values in zip(state, states, strict=True):
            array[positions] = values

    def last_changed(self) -> int:
        """Return when a weight of these flat vectors last changed, on the clock of `tick`."""
        return max((home.last_changed() for home in self.homes), default=0)

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
        sum_squares  for parameters spread over ranks (`Placement.spread`): a function that takes
                     this rank's sum of squares and returns the sum over all ranks, each parameter
                     counted once
        """
        check_setting("max_norm", max_norm)
        spread = [p.placement.spread for p in self.parameters if p.placement.spread]
        if sum_squares is None and spread:
            raise WrongInput(
                "this rank's norm alone is not the global one: parameters are spread over "
                f"{spread[0]}"
            )
        self.collect_gradients()
        gradients = [s.gradient for s in self.slices]
        if sum_squares is None and any(on_gpu(g) for g in gradients):
            norm = scale_on_gpu(gradients, max_norm)
            self._use_buffers()
            return norm
        squares = float(sum(sum_of_squares(g) for g in gradients))
        norm = math.sqrt(squares if sum_squares is None else float(sum_squares(squares)))
        if norm > max_norm:
            for gradient in gradients:
                gradient *= max_norm / norm
            self._use_buffers()
        return norm

    def _use_buffers(self) -> None:
        for p in self.parameters:
            p.use_buffer()


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


def scale_on_gpu(gradients: Sequence[Array], max_norm: float) -> Array:
    """Scale vectors by min(1, max_norm / norm); return the norm. The host does not wait for it."""
    squares = array_module(gradients[0]).empty(len(gradients), np.float64)
    for i, gradient in enumerate(gradients):
        sum_of_squares(gradient, out=squares[i])
    norm = rules.root_of_sum(squares)
    for gradient in gradients:
        rules.clip(norm, max_norm, gradient)
    return norm
