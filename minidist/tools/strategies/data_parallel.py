"""The data-parallel strategies as workers: every rank holds the model and some of the examples."""

from collections import Counter
from dataclasses import replace

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel import bucketed, naive, zero
from minidist.datasets import shard
from minidist.rng import Randomness
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bill,
    collect,
    small_cases,
)


def naive_worker(group: Group, case: Case, micro_batches: int = 1) -> Outcome:
    """Run one batch under data_parallel/naive.py, its examples dealt to ranks and micro-batches."""
    pieces = [_backward(case, part) for part in _parts(group, case, micro_batches)]
    naive.all_reduce_gradients(case.model, group)
    return _data_parallel_outcome(group, case, pieces, bill(group))


def bucketed_worker(group: Group, case: Case, micro_batches: int = 1, cap: int = 300) -> Outcome:
    """Run one batch under data_parallel/bucketed.py, in buckets of `cap` bytes."""
    case.model.flatten(group.empty)
    reducer = bucketed.Bucketed(case.model, group, cap)
    *first, last = _parts(group, case, micro_batches)
    pieces = [_backward(case, part) for part in first]
    with reducer.reduce():
        pieces.append(_backward(case, last))
    return _data_parallel_outcome(group, case, pieces, bill(reducer.group))


def zero_worker(group: Group, case: Case, stage: int, micro_batches: int = 1) -> Outcome:
    """Run one batch, and one step of an optimizer that changes nothing, under ZeRO."""
    model = case.model.flatten(group.empty)
    sharded = zero.Zero(model, group, stage)
    parts, pieces = _parts(group, case, micro_batches), []
    for part in parts:
        x = as_input(case.inputs[part])
        logits = model(x, Randomness(case.seed, 0, part))
        loss = case.loss(logits, case.targets[part], reduction_size=case.targets.size)
        sharded.backward(loss, last=part is parts[-1])
        pieces.append(x)
    gradients = [s.parameter.grad.copy() for s in sharded.shards]
    sharded.step(optim.SGD(sharded.parameters(), lr=0.0))
    moved = bill(*sharded.groups)
    result = {name: np.zeros_like(p.data) for name, p in model.named_parameters().items()}
    for s, gradient in zip(sharded.shards, gradients, strict=True):
        views = s.flat.views(group.all_gather(gradient))
        result |= {p.name: g for p, g in zip(s.flat.parameters, views, strict=True)}
    return Outcome(result | _input_gradient(group, pieces), moved.total(), operations=dict(moved))


def zero_bytes(case: Case, ranks: int, stage: int) -> int:
    """Return (N - 1) P times 2, or 3 in stage 3: P bytes of parameters that are not frozen."""
    micro_batches = case.options.get("micro_batches", 1)
    whole = sum(p.data.nbytes for p in case.model.parameters() if p.requires_grad)
    passes = {1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return passes * (ranks - 1) * whole


def zero_cases(ranks: int, stage: int) -> list[Case]:
    """The small cases; in stage 3 the Transformer is not tied. And two micro-batches."""
    cases = small_cases(ranks)
    if stage == 3:
        free = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2)
        cases[1] = replace(cases[1], model=free)
    two = replace(cases[0], name="MLP, 2 micro-batches", options={"micro_batches": 2})
    return [*cases, two]


def by_examples(case: Case, ranks: int) -> Split:
    """Every rank has some of the examples."""
    return Split(data=ranks, micro_batches=case.options.get("micro_batches", 1))


def _parts(group: Group, case: Case, micro_batches: int) -> list[np.ndarray]:
    """Return this rank's examples, cut into micro-batches."""
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    return np.array_split(mine, micro_batches)


def _backward(case: Case, examples: np.ndarray):
    """Add the gradient of these examples to the model's; return their input."""
    x = as_input(case.inputs[examples])
    logits = case.model(x, Randomness(case.seed, 0, examples))
    case.loss(logits, case.targets[examples], reduction_size=case.targets.size).backward()
    return x


def _data_parallel_outcome(group: Group, case: Case, pieces: list, moved: Counter) -> Outcome:
    """Collect the gradients of a model that every rank holds, and of the input, which none does."""
    gradients = collect(case.model) | _input_gradient(group, pieces)
    return Outcome(gradients, moved.total(), operations=dict(moved))


def _input_gradient(group: Group, pieces: list) -> dict[str, np.ndarray]:
    """Return the gradient of the whole input, if it is floats, of which every rank has a part."""
    if not isinstance(pieces[0], Tensor):
        return {}
    rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in pieces]
    return {INPUT: group.all_gather(np.concatenate(rows))}


def data_parallel_bytes(case: Case, ranks: int) -> int:
    """Return 2 (N - 1) S: all parameters that are not frozen, once scattered, once gathered."""
    return 2 * (ranks - 1) * sum(p.data.nbytes for p in case.model.parameters() if p.requires_grad)
