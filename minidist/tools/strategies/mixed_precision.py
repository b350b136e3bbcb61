"""Mixed precision: some steps in float16 on ranks, and the same steps replayed on one device."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.autograd.losses import scaled
from minidist.backend import beside, widen
from minidist.comm import Group
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.datasets import shard
from minidist.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.planning.costs import mixed_precision as costs
from minidist.rng import generator
from minidist.tools.causes import cause_of
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import (
    Case,
    Outcome,
    as_input,
    bytes_sent,
    collect,
    randomness_of,
    small_cases,
    transformer_example,
)
from minidist.tools.strategies.data_parallel import by_examples, input_gradient
from minidist.tools.strategies.record import Costs, Strategy

Optimizing = Callable[[list[nn.Parameter]], optim.Optimizer]
rule = partial(optim.AdamW, lr=0.05)
whole_rule = partial(optim.SGD, lr=2.0**-4)  # whole numbers become multiples of 1/256


class Replica:
    """A model that every rank has, in the words of Zero: backward, step, parameters, state."""

    def __init__(self, model: nn.Module, group: Group):
        self.model, self.group, self.groups = model, group, []
        self.parameters, self.state = model.parameters, model.state

    def backward(self, loss) -> None:
        loss.backward()
        all_reduce_gradients(self.model, self.group)

    def step(self, optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


def half(case: Case, dtype: str | None, grad_dtype: str | None) -> tuple[nn.Module, np.ndarray]:
    """Return a copy of the model, and the inputs, in another dtype; None: in their own."""
    model, inputs = copy.deepcopy(case.model), case.inputs
    if dtype is not None:
        model.astype(dtype, grad_dtype)
        inputs = inputs if inputs.dtype.kind in "iu" else inputs.astype(dtype)
    return model, inputs


def loss_of(model: nn.Module, case: Case, x: Tensor | np.ndarray, examples, scale: float) -> Tensor:
    """Return the loss of some examples, X, whose gradient is to be scaled."""
    outputs, targets = model(x, randomness_of(case, examples, scale)), case.targets[examples]
    targets = targets.astype(outputs.dtype) if targets.dtype.kind == "f" else targets
    return scaled(case.loss(outputs, targets, reduction_size=case.total), scale)


def mixed_worker(
    group: Group,
    case: Case,
    dtype: str | None = None,
    zero: int = 0,
    steps: int = 0,
    grad_dtype: str | None = None,
    start: float = 2.0**10,
    whole: bool = False,
) -> Outcome:
    """Take some steps in float16; without steps, return one gradient, unscaled.

    dtype  of the weights; None: the model's own, whose gradient is one device's
    zero   0: a replica on every rank; 1 to 3: ZeRO's stage
    start  the first loss scale; it is doubled after two good steps
    whole  the model and its data are whole numbers: the reference is float32 on one device
    """
    model, inputs = half(case, dtype, grad_dtype)
    model.flatten(group.empty)
    share = Zero(model, group, zero) if zero else Replica(model, group)
    mine, how = shard(np.arange(len(inputs)), group.rank, group.size), whole_rule if whole else rule
    optimizer = MixedPrecision(how(share.parameters()), group, LossScale(start, every=2))
    found, updates, x = {}, [], as_input(inputs[mine])
    with overflow_allowed():
        for _ in range(max(1, steps)):
            scale = optimizer.loss_scale
            share.backward(loss_of(model, case, x, mine, scale))
            found = {n: widen(g) / scale for n, g in collect(model).items()}
            share.step(optimizer)
            updates.append(optimizer.steps)
    moved = bytes_sent(group, *share.groups)
    if dtype is None and not steps:
        whole_input = {n: g / scale for n, g in input_gradient(group, [x]).items()}
        return Outcome(found | whole_input, moved.total(), operations=dict(moved))
    if steps:
        found = share.state() | {UPDATES: np.array([optimizer.steps])}
    updates = group.all_gather(np.array([updates])).tolist()
    again = partial(replay, case, group.size, steps, grad_dtype, start, how)
    want = again(dtype="float32") if whole else again()
    words = said(found, want, updates, again)
    return Outcome(found, moved.total(), want, operations=dict(moved), said=words)


UPDATES = "(updates)"


def replay(
    case: Case,
    shares: int,
    steps: int,
    grad_dtype: str | None,
    start: float,
    how: Optimizing,
    dtype: str = "float16",
    divide: str = "own",
    copies: bool = True,
) -> dict[str, np.ndarray]:
    """Return what one device finds, which adds the gradients of the shards in their order.

    Its float32 copies are a model of their own, which an ordinary optimizer trains.

    divide  by the scale of its "own" step, the "next" one, or "no" scale: the last two are mistakes
    copies  False: update the float16 weights, a mistake
    """
    model, inputs = half(case, dtype, grad_dtype if dtype == "float16" else None)
    wide = copy.deepcopy(model).astype("float32")
    optimizer, scale, good = how(wide.parameters()), start, 0
    parts = [shard(np.arange(len(inputs)), r, shares) for r in range(shares)]
    for _ in range(max(1, steps)):
        total = sum_of_shards(model, case, inputs, parts, scale)
        finite = all(np.isfinite(g).all() for g in total.values())
        found = {name: g / np.float32(scale) for name, g in total.items()}
        good, own = good + 1 if finite else 0, scale
        if good == 2 or not finite:
            scale, good = 2 * scale if finite else scale / 2, 0
        if finite:
            by = {"own": own, "next": scale, "no": 1.0}[divide]
            for name, p in wide.named_parameters().items():
                p.grad = beside(total[name] / np.float32(by), p.data)
            optimizer.step()
            optimizer.zero_grad()
            model.load_state(wide.state())
            wide.load_state(wide.state() if copies else model.state())
    return model.state() | {UPDATES: np.array([optimizer.steps])} if steps else found


def sum_of_shards(model, case: Case, inputs, parts: list, scale: float) -> dict[str, np.ndarray]:
    """Return the sum of the gradients of some parts of the batch, added in the model's dtype."""
    total: dict[str, np.ndarray] = {}
    with overflow_allowed():
        for part in parts:
            loss_of(model, case, inputs[part], part, scale).backward()
            own = collect(model)
            total = {name: total[name] + g if total else g for name, g in own.items()}
            model.zero_grad()
    return {name: g.astype("float32") for name, g in total.items()}


def said(found: dict, want: dict, updates: list, again: Callable[..., dict]) -> str | None:
    """Return the cause in words, where the results are not those of one device.

    updates  per rank, how many it had done after each step
    """
    for rank, own in enumerate(updates):
        if own != updates[0]:
            step = next(
                i for i, pair in enumerate(zip(own, updates[0], strict=True)) if len(set(pair)) > 1
            )
            return (
                f"after step {step} rank {rank} has done {own[step]} updates, rank 0 "
                f"{updates[0][step]}: each decided alone which steps to skip"
            )
    if all(np.array_equal(found[name], w) for name, w in want.items()):
        return None
    others = {
        "that does not divide by the loss scale": partial(again, divide="no"),
        "that divides by the next step's loss scale": partial(again, divide="next"),
        "that keeps no float32 copies": partial(again, copies=False),
    }
    if known := cause_of.replays(found, others):
        return known
    if UPDATES in want and found[UPDATES] != want[UPDATES]:
        return f"{found[UPDATES][0]} updates are counted, not {want[UPDATES][0]}: some were skipped"
    return None


def whole_numbers(ranks: int) -> Case:
    """Return an MLP with relu on whole numbers, of which no sum leaves float16's."""
    random = generator(0, "whole numbers")
    model = nn.MLP([4, 8, 4], activation="relu", dtype="float32")
    for name, p in model.named_parameters().items():
        p.data[...] = generator(0, name).integers(-1, 2, p.shape)
    x, y = (random.integers(-2, 3, (8, 4)).astype("float32") for _ in range(2))
    options = {"dtype": "float16", "whole": True, "steps": 1, "start": 2.0**2}
    return Case("whole numbers, as in float32", model, x, y, nn.squared_error, options=options)


def mixed_cases(ranks: int) -> list[Case]:
    """The limits, float64 and whole numbers; one gradient, steps that overflow, and ZeRO."""
    mlp, transformer, few, _ = small_cases(ranks)
    free = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2)
    untied = replace(transformer, model=free)
    more = [
        ("Transformer, float16", transformer, {}),
        ("Transformer, overflow", transformer, {"start": 2.0**20, "steps": 8}),
        ("MLP, sums in float32", mlp, {"grad_dtype": "float32", "steps": 3}),
        ("MLP, 2 examples, ZeRO 1", few, {"zero": 1, "steps": 3}),
        ("MLP, ZeRO 2, overflow", mlp, {"zero": 2, "steps": 8, "start": 2.0**20}),
        ("Transformer, ZeRO 3", untied, {"zero": 3, "steps": 3, "grad_dtype": "float32"}),
    ]
    in_float16 = [
        replace(case, name=name, options=options | {"dtype": "float16"})
        for name, case, options in more
    ]
    limit = replace(mlp, name="MLP, the scale alone")  # float64 times a power of two is exact
    return [limit, *in_float16, whole_numbers(ranks)]


def mixed_step(group: Group, case: Case, watch: Watch) -> None:
    model, inputs = half(case, "float16", None)
    homes = [layer.flat for layer in model.layers]
    optimizer = MixedPrecision(adamw(model.parameters()), group, LossScale(2.0**10))
    weights = [p.data for p in model.parameters()]
    watch.model(model)
    mine = shard(np.arange(len(inputs)), group.rank, group.size)
    loss = watch.graph(
        loss_of(model, case, inputs[mine], mine, optimizer.loss_scale), parameters=weights
    )
    loss.backward()
    all_reduce_gradients(model, group)
    optimizer.step()
    watch.sends(group)
    watch.holds(homes, optimizer)


STRATEGIES = [
    Strategy(
        name="mixed_precision",
        idea="16-bit weights, activations and gradients; float32 copies, loss scaling",
        term="混合精度, 损失缩放",
        paper="Micikevicius et al. 2018, sections 3.1 to 3.3",
        family="mixed precision",
        files=("mixed_precision.py",),
        lesson="18_mixed_precision",
        worker=mixed_worker,
        promise="invariant",
        cases=mixed_cases,
        costs=Costs(
            costs.mixed_bytes,
            costs.mixed_costs,
            mixed_step,
            example=partial(transformer_example, dtype="float16"),
        ),
        split=by_examples,
        tests=("test_mixed_precision.py",),
    )
]
