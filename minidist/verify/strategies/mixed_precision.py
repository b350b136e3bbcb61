"""Mixed precision: some steps in float16 on ranks, and the same steps replayed on one device."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import optim
from minidist.backend import FLOAT16, on_device_of, rounded, widen
from minidist.comm import Group
from minidist.data_parallel.replicated import DataParallel
from minidist.data_parallel.zero import Zero
from minidist.nn.datasets import Batch
from minidist.nn.optim import Optimizer
from minidist.parallel import check_statistics
from minidist.parallel.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.parallel.trainer import loss_of
from minidist.rng import draws_for
from minidist.verify.strategies.cases import INPUT, Case, collect
from minidist.verify.strategies.job import Arrays, AtWork, Rule
from minidist.verify.strategies.record import record

rule = partial(optim.AdamW, lr=0.05)
whole_rule = partial(optim.SGD, lr=2.0**-4)  # whole numbers become multiples of 1/256


def half(case: Case, dtype: str | None, grad_dtype: str | None) -> Case:
    """Return the case with a copy of its model, in another dtype; None: in its own."""
    model, data = copy.deepcopy(case.model), [case.inputs, case.targets]
    if dtype is not None:
        model.astype(dtype, grad_dtype)
        data = [array if array.dtype.kind in "iu" else array.astype(dtype) for array in data]
    inputs, targets = data
    return replace(case, model=model, inputs=inputs, targets=targets)


class HalfPrecision(AtWork):
    """Some steps in float16, which are replayed; without steps, one gradient, unscaled.

    dtype  of the weights; None: the model's own, whose gradient is one device's
    zero   0: a replica on every rank; 1 to 3: ZeRO's stage
    start  the first loss scale; it is doubled after two good steps
    whole  the model and its data are whole numbers: the reference is float32 on one device
    stochastic
           no float32 copies and no scale: weights and moments are rounded at random
    """

    replay: Callable[[], Arrays]

    def __init__(
        self,
        group: Group,
        case: Case,
        dtype: str | None = None,
        zero: int = 0,
        steps: int = 0,
        grad_dtype: str | None = None,
        start: float = 2.0**10,
        whole: bool = False,
        stochastic: bool = False,
    ):
        # Its statistics have no scale here.
        check_statistics(case.model, group.size, loads=True)
        make = partial(Zero, stage=zero) if zero else DataParallel
        cast, of_steps = half(case, dtype, grad_dtype), whole_rule if whole else rule
        replayed = partial(
            replay,
            case,
            group.size,
            steps,
            grad_dtype,
            start=1.0 if stochastic else start,
            rule=of_steps,
            dtype="float32" if whole else "float16",
            stochastic=stochastic,
        )
        super().__init__(group, cast, make, [cast.batch] * steps, replayed, of_steps)
        self.groups = list(dict.fromkeys([group, *self.groups]))  # whether a step overflows
        self.start, self.stochastic, self.exact = start, stochastic, dtype is None and not steps

    def begin(self, rule: Rule) -> None:
        super().begin(rule)
        if self.stochastic:
            self.optimizer.rounding = optim.StochasticRounding(self.case.seed)
        else:
            scale = LossScale(self.start, every=2)
            self.optimizer = MixedPrecision(self.optimizer, self.group, scale)

    def backward(self) -> None:
        with overflow_allowed():
            super().backward()

    def step(self) -> None:
        with overflow_allowed():
            super().step()

    def result(self) -> Arrays:
        if self.trains:
            return super().result() | {UPDATES: np.array([self.optimizer.steps])}
        scale = self.optimizer.loss_scale
        gradients = {name: widen(g) / scale for name, g in super().result().items()}
        return gradients if self.exact else {n: g for n, g in gradients.items() if n != INPUT}

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        return None if self.exact or self.group.rank else self.replay(), None


UPDATES = "(updates)"


def replay(
    case: Case,
    shares: int,
    steps: int,
    grad_dtype: str | None,
    start: float,
    rule: Rule,
    dtype: str,
    stochastic: bool,
) -> dict[str, np.ndarray]:
    """Return the weights, or a gradient, of one device that adds the shards' in their order.

    Its float32 copies are a model of their own, which an ordinary optimizer trains. If stochastic,
    they are rounded after each step, and the loss scale stays as it is.
    """
    case = half(case, dtype, grad_dtype if dtype == "float16" else None)
    model, wide = case.model, copy.deepcopy(case.model).astype("float32")
    optimizer, scale, good = rule(wide.parameters()), start, 0
    parts = [case.batch.share(rank, shares) for rank in range(shares)]
    for step in range(1, max(1, steps) + 1):
        total = sum_of_shards(case, parts, scale)
        finite = all(np.isfinite(g).all() for g in total.values())
        gradients = {name: g / np.float32(scale) for name, g in total.items()}
        good = good + 1 if finite else 0
        if not stochastic and (good == 2 or not finite):
            scale, good = 2 * scale if finite else scale / 2, 0
        if finite:
            for name, p in wide.named_parameters().items():
                p.grad = on_device_of(gradients[name], p.data)
            optimizer.step()
            optimizer.zero_grad()
            if stochastic:
                round_at_random(optimizer, case.seed, step)
            model.load_state(wide.state())
    return model.state() | {UPDATES: np.array([optimizer.steps])} if steps else gradients


def round_at_random(optimizer: Optimizer, seed: int, step: int) -> None:
    """Round whole weights and moments to float16, each by its name."""
    for s, state in zip(optimizer.slices, optimizer.state or [], strict=True):
        for p, at in s.parts.items():
            for number, array in enumerate([s.data, *state]):
                every = p.xp.arange(p.size, dtype="uint64")
                draws = draws_for(seed, step, f"{number}/{p.name}", every)
                array[at] = rounded(array[at], FLOAT16, draws)


def sum_of_shards(case: Case, parts: list[Batch], scale: float) -> dict[str, np.ndarray]:
    """Return the sum of the gradients of some parts of the batch, added in the model's dtype."""
    total: dict[str, np.ndarray] = {}
    with overflow_allowed():
        for part in parts:
            loss_of(case.model, replace(part, loss_scale=scale)).backward()
            shard = collect(case.model)
            total = {name: total[name] + g if total else g for name, g in shard.items()}
            case.model.zero_grad()
    return {name: g.astype("float32") for name, g in total.items()}


STRATEGIES = [record("mixed_precision", start=HalfPrecision)]
