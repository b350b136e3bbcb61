"""Data parallelism: every rank holds the model, or a shard of it, and some of the examples."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel import bucketed, naive, zero
from minidist.datasets import shard
from minidist.planning.costs import data_parallel as costs
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bytes_sent,
    collect,
    dual_case,
    randomness_of,
    small_cases,
    translator_case,
)
from minidist.tools.strategies.record import ANY, LAYERS, Costs, Strategy


def replica_worker(
    group: Group, case: Case, reduce: Callable[[nn.Module, Group], None], micro_batches: int = 1
) -> Outcome:
    """Run one batch on replicas; its examples are dealt to ranks and micro-batches.

    reduce  (model, group) -> None: makes the ranks' gradients their sum, on every rank
    """
    pieces = [_backward(case, part) for part in _parts(group, case, micro_batches)]
    reduce(case.model, group)
    return _data_parallel_outcome(group, case, pieces, bytes_sent(group))


naive_worker = partial(replica_worker, reduce=naive.all_reduce_gradients)


def bucketed_worker(group: Group, case: Case, micro_batches: int = 1, cap: int = 300) -> Outcome:
    """Run one batch under data_parallel/bucketed.py, in buckets of `cap` bytes."""
    case.model.flatten(group.empty)
    reducer = bucketed.Bucketed(case.model, group, cap)
    *first, last = _parts(group, case, micro_batches)
    pieces = [_backward(case, part) for part in first]
    with reducer.reduce():
        pieces.append(_backward(case, last))
    return _data_parallel_outcome(group, case, pieces, bytes_sent(reducer.group))


def zero_worker(group: Group, case: Case, stage: int, micro_batches: int = 1) -> Outcome:
    """Run one batch, and one step of an optimizer that changes nothing, under ZeRO."""
    model = case.model.flatten(group.empty)
    sharded = zero.Zero(model, group, stage)
    parts, pieces = _parts(group, case, micro_batches), []
    for part in parts:
        x = as_input(case.inputs[part])
        logits = model(x, randomness_of(case, part))
        loss = case.loss(logits, case.targets[part], reduction_size=case.total)
        sharded.backward(loss, last=part is parts[-1])
        pieces.append(x)
    gradients = [s.parameter.grad.copy() for s in sharded.shards]
    sharded.step(optim.SGD(sharded.parameters(), lr=0.0))
    moved = bytes_sent(*sharded.groups)
    result = collect(model)  # zeros of what is frozen, and running statistics
    for s, gradient in zip(sharded.shards, gradients, strict=True):
        views = s.flat.views(group.all_gather(gradient))
        result |= {p.name: g for p, g in zip(s.flat.parameters, views, strict=True)}
    return Outcome(result | input_gradient(group, pieces), moved.total(), operations=dict(moved))


def replica_cases(ranks: int) -> list[Case]:
    """The small cases, a Seq2Seq, and two that are trained together."""
    return [*small_cases(ranks), translator_case(), dual_case()]


def zero_cases(ranks: int, stage: int) -> list[Case]:
    """The same, and two micro-batches; in stage 3 the Transformer is not tied.

    From stage 2 on no nn.Dual: it is no composition of layers.
    """
    cases = [*small_cases(ranks), translator_case()] if stage > 1 else replica_cases(ranks)
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
    logits = case.model(x, randomness_of(case, examples))
    case.loss(logits, case.targets[examples], reduction_size=case.total).backward()
    return x


def _data_parallel_outcome(group: Group, case: Case, pieces: list, moved: Counter) -> Outcome:
    """Collect the gradients of the model, which every rank holds, and of the split input."""
    gradients = collect(case.model) | input_gradient(group, pieces)
    return Outcome(gradients, moved.total(), operations=dict(moved))


def input_gradient(group: Group, pieces: list) -> dict[str, np.ndarray]:
    """Return the gradient of the whole input, if it is floats, put together from all ranks."""
    if not isinstance(pieces[0], Tensor):
        return {}
    rows = [np.zeros_like(x.data) if x.grad is None else x.grad for x in pieces]
    return {INPUT: group.all_gather(np.concatenate(rows))}


# One step with AdamW, watched.


def _loss(group: Group, case: Case, watch: Watch, model: nn.Module) -> Tensor:
    """Return the loss of this rank's examples, divided by the whole batch's number of targets."""
    weights = [p.data for p in model.parameters()]
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    y = model(case.inputs[mine], randomness_of(case, mine))
    y = case.loss(y, case.targets[mine], reduction_size=case.total)
    return watch.graph(y, parameters=weights)


def replica_step(
    group: Group, case: Case, watch: Watch, reduce: Callable[[nn.Module, Group], None]
) -> None:
    model = case.model
    homes = [layer.flat for layer in model.layers]
    watch.model(model)
    optimizer = adamw(model.parameters())
    _loss(group, case, watch, model).backward()
    reduce(model, group)
    watch.sends(group)
    optimizer.step()
    watch.holds(homes, optimizer)


def bucketed_step(group: Group, case: Case, watch: Watch) -> None:
    model = case.model.flatten(group.empty)
    homes = [layer.flat for layer in model.layers]
    reducer, optimizer = bucketed.Bucketed(model, group), adamw(model.parameters())
    watch.model(model)
    loss = _loss(group, case, watch, model)
    with reducer.reduce():
        loss.backward()
    watch.sends(reducer.group)
    optimizer.step()
    watch.holds(homes, optimizer)


def zero_step(group: Group, case: Case, watch: Watch, stage: int) -> None:
    model = case.model.flatten(group.empty)
    sharded = zero.Zero(model, group, stage)
    optimizer = adamw(sharded.parameters())
    watch.model(model)
    sharded.backward(_loss(group, case, watch, model))
    sharded.step(optimizer)
    watch.sends(*sharded.groups)
    homes = [home for s in sharded.shards for home in (s.flat, s.home)]
    watch.holds(homes, optimizer, sharded.places[1:], sharded.places[:1])


GRADIENTS = Costs(
    costs.data_parallel_bytes,
    costs.data_parallel_costs,
    partial(replica_step, reduce=naive.all_reduce_gradients),
)


def _zero(stage: int, idea: str, term: str) -> Strategy:
    return Strategy(
        name=f"zero_{stage}",
        idea=idea,
        term=term,
        paper=f"Rajbhandari et al. 2020, section 5.{stage}",
        family="ZeRO",
        files=("data_parallel/zero.py",),
        lesson="05_zero",
        worker=partial(zero_worker, stage=stage),
        promise="exact",
        cases=partial(zero_cases, stage=stage),
        costs=Costs(
            partial(costs.zero_bytes, stage=stage),
            partial(costs.zero_costs, stage=stage),
            partial(zero_step, stage=stage),
        ),
        split=by_examples,
        models=LAYERS if stage > 1 else ANY,
        tests=("data_parallel/test_zero_memory.py", "data_parallel/test_zero.py"),
    )


STRATEGIES = [
    Strategy(
        name="naive",
        idea="data parallelism: a weighted average of gradients",
        term="数据并行, 加权平均",
        paper="Goyal et al. 2017, section 3",
        family="data parallelism",
        files=("data_parallel/naive.py",),
        lesson="03_data_parallel",
        worker=naive_worker,
        promise="exact",
        cases=replica_cases,
        costs=GRADIENTS,
        split=by_examples,
        tests=("data_parallel/test_naive.py",),
    ),
    Strategy(
        name="bucketed",
        idea="communication during backward, in buckets",
        term="通信与计算重叠",
        paper="Li et al. 2020, section 3.2",
        family="data parallelism",
        files=("data_parallel/bucketed.py",),
        lesson="03_data_parallel",
        worker=bucketed_worker,
        promise="exact",
        cases=replica_cases,
        costs=replace(GRADIENTS, step=bucketed_step),
        split=by_examples,
        tests=("data_parallel/test_bucketed.py",),
    ),
    _zero(1, "the optimizer's state sharded", "参数切分: 优化器状态"),
    _zero(2, "the optimizer's state and the gradients sharded", "参数切分: 梯度"),
    _zero(3, "all sharded; the parameters are gathered layer by layer", "参数切分: 参数"),
]
