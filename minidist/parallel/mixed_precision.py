"""Mixed precision: weights and activations in 16 bits, and what 16 bits lose kept in 32.

Micikevicius et al., Mixed Precision Training (ICLR 2018). Three things repair what float16 loses:

    3.1  master copies    an update is often smaller than half the distance between two float16
                          numbers; added to a float32 copy of the weight, it is not lost
    3.2  loss scaling     many of a model's gradients may be below 6e-8, float16's smallest number;
                          the loss is multiplied by a power of two, and the gradient divided by it
    3.3  float32 sums     products, norms and softmax add up in float32 (see backend.widen)

    model.astype("float16")                                    # grad_dtype="float32": wider sums
    optimizer = MixedPrecision(optim.AdamW(hybrid.parameters(), lr=3e-4), mesh.group)
    hybrid.backward(Batch(inputs, targets, loss_scale=optimizer.loss_scale))
    optimizer.clip_global_norm(1.0, hybrid.sum_squares)
    hybrid.step(optimizer)

It is an optimizer around an optimizer, so that every strategy that takes an optimizer takes it: a
rank has float32 copies of what it updates, with ZeRO of its shards only. A step: are all gradients
of all ranks finite? If so, unscale, clip, update the copies, round them into the weights. If not,
no rank updates anything: one all_reduce of a byte per rank decides it for all of them.

Bytes per parameter, with Adam: 2 weight, 2 gradient (4 if it is float32), and 12 that the optimizer
keeps: the copy and two moments. In float32 alone there are 16, too: 4, 4 and 8.

Without copies: nn/optim/stochastic_rounding.py. Products of 8 bits: `multiply_in_eight_bits` below.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Integral
from typing import Generic, TypeVar

import numpy as np

from minidist.autograd.eight_bits import EightBits
from minidist.autograd.recording import Since
from minidist.backend import Array, array_module, widen
from minidist.comm import Group
from minidist.errors import WrongInput, check_number
from minidist.nn import Linear, Module, Parameter
from minidist.nn.flat_parameters import FlatSlice
from minidist.nn.mixture_of_experts import MixtureOfExperts
from minidist.nn.optim import Optimizer, check_setting

T = TypeVar("T")

LARGEST = 2.0**127  # a power of two in float32, in which a loss has its gradient


class LossScale:
    """What the gradient is multiplied by in backward: a power of two, so that nothing is rounded.

    A step whose gradient overflows is skipped. The scale is then halved, and doubled after `every`
    good steps in a row: so it stays close to the largest one that does not overflow. Gradients of
    zero never do; so it is not doubled beyond LARGEST.

    every  None: the scale is static
    """

    def __init__(self, value: float = 2.0**16, every: int | None = 2000):
        check_scale(value)
        if every is not None:
            allowed = "the scale is doubled after 1 good step or more"
            check_number(allowed, every, lambda n: n >= 1, Integral)
        self.value, self.every = float(value), every
        self.good, self.skipped = 0, 0  # steps in a row, steps

    @property
    def state(self) -> dict:
        """What a run goes on from, JSON: the scale, good steps in a row, skipped steps."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    @state.setter
    def state(self, state: dict) -> None:
        check_scale(state["value"])
        self.value, self.good, self.skipped = state["value"], state["good"], state["skipped"]

    def update(self, overflow: bool) -> None:
        """Record a step; choose the scale of the next one. ValueError: 1 is too large, too."""
        self.skipped += overflow
        self.good = 0 if overflow else self.good + 1
        if self.every is None:
            return
        if overflow:
            if self.value <= 1:
                raise WrongInput(
                    "gradients are not finite, though the loss is not scaled; use a lower learning "
                    "rate, or bfloat16"
                )
            self.value /= 2
        elif self.good == self.every:
            self.value, self.good = min(self.value * 2, LARGEST), 0


def check_scale(value: float) -> None:
    """Raise ValueError unless this is a power of two that a float32 can be multiplied by."""
    allowed = "a loss scale is a power of two up to 2^127, for others would round or overflow"
    check_number(allowed, value, lambda x: 0 < x <= LARGEST and math.frexp(x)[0] == 0.5)


class Inner(Generic[T]):
    """An attribute of MixedPrecision that is its inner optimizer's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, outer: "MixedPrecision", owner: type | None = None) -> T:
        return getattr(outer.optimizer, self.name)

    def __set__(self, outer: "MixedPrecision", value: T) -> None:
        setattr(outer.optimizer, self.name, value)


class MixedPrecision:
    """An optimizer of half-precision parameters that updates float32 copies of them.

    optimizer  of this rank's parameters, or shards, in float16 or bfloat16
    group      all ranks that train the model: they skip a step together
    scale      of the loss; by default dynamic
    """

    def __init__(self, optimizer: Optimizer, group: Group, scale: LossScale | None = None):
        self.optimizer, self.group = optimizer, group
        self.scale = LossScale() if scale is None else scale
        self._copies = [
            s.data.astype(np.promote_types(s.data.dtype, "float32")) for s in self.slices
        ]
        for home in optimizer.homes:
            home.scale = self.scale  # for those who keep gradients from step to step
        self.made = Since(optimizer.last_changed)  # the copies, from the weights
        self.factor = 1.0  # by which clipping shortens the gradient

    parameters = Inner[list[Parameter]]()
    slices = Inner[list[FlatSlice]]()
    kind = Inner[str]()
    lr = Inner[float]()
    steps = Inner[int]()
    state = Inner[list[list[Array]] | None]()
    arrays_for = Inner[Callable[[FlatSlice], int]]()
    state_like = Inner[Callable[[FlatSlice], Array]]()

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @property
    def copies(self) -> list[Array]:
        """The float32 copies, one per flat slice, of the weights as they are now.

        Weights that something else has changed since the last step, such as load_state, are taken
        over. What is written to `p.data[...]` is undone, unless `p.home.changed()` follows it:
        use `p.load(array)`.
        """
        if self.made.behind():
            self.made.follow()
            for s, copy in zip(self.slices, self._copies, strict=True):
                xp = array_module(copy)
                kept = copy.astype(s.data.dtype) == s.data
                copy[...] = xp.where(kept, copy, widen(s.data))
        return self._copies

    def clip_global_norm(
        self, max_norm: float, sum_squares: Callable[[float], float] | None = None
    ) -> float:
        """Note by what the step is to shorten the gradient; return its norm, without the scale.

        The gradients do not change: small ones would be lost. See Optimizer.clip_global_norm.
        """
        check_setting("max_norm", max_norm)
        norm = float(self.optimizer.clip_global_norm(math.inf, sum_squares)) / self.loss_scale
        self.factor = max_norm / norm if max_norm < norm < math.inf else 1.0
        return norm

    def step(self) -> None:
        """Update, if the gradients of all ranks are finite; choose the next scale."""
        factor, self.factor = self.factor / self.loss_scale, 1.0
        overflow = self.overflow()
        if not overflow:
            self.optimizer.step(self.copies, factor)
            self.made.follow()
        self.scale.update(overflow)

    def overflow(self) -> bool:
        """Return whether any gradient of any rank is infinite or no number; all return the same."""
        self.optimizer.collect_gradients()
        finite = all(bool(array_module(s.data).isfinite(s.gradient).all()) for s in self.slices)
        flag = np.array(not finite, np.uint8)
        return bool(self.group.all_reduce(flag, op="max", label="overflow"))

    def zero_grad(self) -> None:
        self.factor = 1.0
        self.optimizer.zero_grad()

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        for home in self.optimizer.homes:  # a vector is copied without its scale
            home.scale = self.scale


AnyOptimizer = Optimizer | MixedPrecision


def overflow_allowed() -> AbstractContextManager:
    """Return a context without NumPy's warnings of overflow, which skips a step."""
    return np.errstate(over="ignore", invalid="ignore")


def underflow(gradients: dict[str, np.ndarray], dtype, scale: float = 1.0) -> float:
    """Return which share of the nonzero elements is 0 in `dtype`, multiplied by the scale."""
    arrays = [np.asarray(g, np.float64) * scale for g in gradients.values()]
    with overflow_allowed():
        lost = sum(int(((g != 0) & (g.astype(dtype) == 0)).sum()) for g in arrays)
    return lost / max(1, sum(int((g != 0).sum()) for g in arrays))


def multiply_in_eight_bits(model: Module, how: EightBits | None = None) -> None:
    """Let the products of the linear layers have eight-bit factors; do this before a split.

    As in DeepSeek-V3 (section 3.3.1) embedding, norms, attention's softmax, gates and the last
    layer have 16 bits or more. So have experts here: their rows are of all examples, and strips of
    them would be others on another split.

    how  by default EightBits()
    """
    if split := [p.name for p in model.parameters() if p.placement.spread or p.placement.elsewhere]:
        raise WrongInput(
            f"{split[0]} belongs to a model that ranks have split: blocks and scales would be of "
            "parts; call multiply_in_eight_bits before a strategy takes the model"
        )
    experts = {m for e in model.modules(MixtureOfExperts) for m in e.modules(Linear)}
    for layer in model.layers[:-1]:
        for linear in layer.modules(Linear):
            if linear not in experts:
                linear.weight.format = replace(linear.weight.format, product=how or EightBits())
