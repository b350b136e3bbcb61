"""Data parallelism that sends less: compressed gradients, with error feedback."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.compression import Compressor, ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.datasets import shard
from minidist.planning.costs import compression as costs
from minidist.rng import Randomness, generator
from minidist.tools import replay_data_parallel as replays
from minidist.tools.causes import cause_of
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import (
    Case,
    Outcome,
    bytes_sent,
    small_cases,
    transformer_example,
)
from minidist.tools.strategies.data_parallel import by_examples, replica_worker
from minidist.tools.strategies.pipedream import momentum, twice
from minidist.tools.strategies.record import Costs, Strategy


def top_k_worker(
    group: Group, case: Case, share: float = 1.0, minibatches: int | None = None
) -> Outcome:
    """Send `share` of each gradient's elements, the largest; by default all of them."""
    dense = partial(replays.dense_top_k, share)
    others = {"in which values are put at the places of another rank": dense(moved=1)}
    return _compressed(group, case, TopK(share), dense(), minibatches, others, share == 1)


def sign_worker(group: Group, case: Case, minibatches: int | None = None) -> Outcome:
    """Send the signs, and the mean size."""
    others = {"in which all signs have the scale of rank 0": replays.dense_sign(scale_of=0)}
    return _compressed(group, case, Sign(), replays.dense_sign(), minibatches, others)


def int8_worker(group: Group, case: Case, minibatches: int | None = None) -> Outcome:
    """Send 8 bits per element, rounded at random."""
    dense = partial(replays.dense_int8, case.seed)
    others = {"in which all ranks draw the same numbers": dense(alike=True)}
    return _compressed(group, case, Int8(case.seed), dense(), minibatches, others)


def power_sgd_worker(
    group: Group, case: Case, rank: int | None = None, minibatches: int | None = None
) -> Outcome:
    """Send matrices at this rank; by default at full rank, at which nothing is lost."""
    dense = partial(replays.dense_power_sgd, rank, case.seed)
    others = {"in which every step begins with a Q drawn anew": dense(warm=False)}
    compress = PowerSGD(rank, case.seed)
    return _compressed(group, case, compress, dense(), minibatches, others, rank is None)


def _compressed(
    group: Group,
    case: Case,
    compress: Compressor,
    dense: replays.Dense,
    minibatches: int | None,
    others: dict[str, replays.Dense],
    limit: bool = False,
) -> Outcome:
    """Train on a stream of minibatches and replay it; by default, one batch's gradient.

    The outcome of one batch is what the ranks have sent, plus what they remember unless this is the
    limit in which they have sent all: one device's gradient.

    others  {what is different about it: the compressor of a replay that went wrong}
    """
    if not minibatches:
        return replica_worker(group, case, partial(_sum, compress, remembered=not limit))
    model, backward = copy.deepcopy(case.model), backward_of(case, minibatches, group.size)
    feedback, optimizer = ErrorFeedback(model, group, compress), momentum(model.parameters())
    for step in range(minibatches):
        backward(model, step, group.rank)
        feedback.all_reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    replay = partial(replays.replay_compressed, case.model, minibatches, group.size, backward)
    right = partial(replay, dense=dense, optimizer=momentum)
    wrong = {what: partial(right, dense=other) for what, other in others.items()}
    wrong["without error feedback"] = partial(right, feedback=False)
    wrong["that updates twice"] = partial(right, optimizer=twice)
    return replayed(group, model, right, wrong)


def _sum(compress: Compressor, model: nn.Module, group: Group, remembered: bool) -> None:
    """Make the gradients the sum of what the ranks have sent, and of what they remember."""
    feedback, apart = ErrorFeedback(model, group, compress), group.split(0)
    feedback.all_reduce_gradients()
    for name, p in model.named_parameters().items():
        if remembered and name in feedback.errors:
            p.grad = p.grad + apart.all_reduce(feedback.errors[name])


def replayed(
    group: Group, model: nn.Module, replay: Callable[[], dict], wrong: dict[str, Callable]
) -> Outcome:
    """Return the weights, what they should be, and a replay gone wrong that they equal instead."""
    weights, moved = model.state(), bytes_sent(group)
    want, said = replay() if group.rank == 0 else None, None
    if want is not None and any(not np.array_equal(weights[name], w) for name, w in want.items()):
        said = cause_of.replays(weights, wrong)
    return Outcome(weights, moved.total(), want, said=said, operations=dict(moved))


def backward_of(case: Case, minibatches: int, ranks: int) -> replays.Backward:
    """Return (model, step, rank) -> None: adds the gradient of a rank's share of a minibatch."""
    cut = np.array_split(np.arange(len(case.inputs)), minibatches)

    def backward(model: nn.Module, step: int, rank: int) -> None:
        mine = shard(cut[step], rank, ranks)
        y = model(case.inputs[mine], Randomness(case.seed, step, mine, len(cut[step])))
        total = nn.counted(case.targets[cut[step]])
        case.loss(y, case.targets[mine], reduction_size=total).backward()

    return backward


def compressed_cases(ranks: int, limit: bool = True, **options) -> list[Case]:
    """Two streams; the limit in which nothing is left out, if there is one; other batches.

    options  of the compressor, beyond its limit
    """
    mlp, transformer, few, experts = small_cases(ranks)
    everything = [replace(c, name=f"{c.name}, nothing left out") for c in (mlp, few)]
    batch = [replace(c, options=options) for c in (transformer, experts)]
    return [*streams(ranks, **options), *(everything if limit else [mlp]), *batch]


def streams(ranks: int, **options) -> list[Case]:
    """An MLP on 6 minibatches of 4 or 5 examples, a Transformer on 4 of 3."""
    random = generator(0, "compressed streams")
    mlp = nn.MLP([6, 9, 5, 3], activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2, tied=True)
    images, labels = random.standard_normal((26, 6)), random.integers(0, 3, 26)
    tokens, nexts = random.integers(0, 11, (2, 12, 5))
    return [
        Case("MLP, 6 steps", mlp, images, labels, options={"minibatches": 6} | options),
        Case(
            "Transformer, 4 steps", transformer, tokens, nexts, options={"minibatches": 4} | options
        ),
    ]


def compressed_step(group: Group, case: Case, watch: Watch, compress: Callable) -> None:
    """One step with AdamW, watched; compress: (**the case's options) -> Compressor."""
    model = case.model
    homes, weights = [layer.flat for layer in model.layers], [p.data for p in model.parameters()]
    compressor = watch.compressor(compress(**case.options))
    optimizer = adamw(model.parameters())
    feedback = ErrorFeedback(model, group, compressor)
    watch.model(model)
    mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
    y = case.loss(model(case.inputs[mine]), case.targets[mine], reduction_size=case.total)
    watch.graph(y, parameters=weights).backward()
    feedback.all_reduce_gradients()
    watch.sends(group)
    optimizer.step()
    kept = [*feedback.errors.values(), *getattr(compressor, "q", {}).values()]
    watch.holds(homes, optimizer, gradients=kept)


def _compression(
    name: str,
    idea: str,
    term: str,
    paper: str,
    file: str,
    worker: Callable,
    compress: Callable,
    nbytes: Callable,
    forms: Callable = costs.memory_costs,
    example: dict | None = None,
    **options,
) -> Strategy:
    """options: of the cases; example: of the example on which strategies are compared."""
    step = partial(compressed_step, compress=compress)
    case = partial(transformer_example, **(example or {}))
    return Strategy(
        name=name,
        idea=idea,
        term=term,
        paper=paper,
        lesson="19_fewer_bytes",
        promise="invariant",
        split=by_examples,
        family="compression",
        files=(f"data_parallel/{file}.py",),
        worker=worker,
        cases=partial(compressed_cases, **options),
        costs=Costs(nbytes, forms, step, example=case),
        tests=(f"data_parallel/test_{file}.py",),
    )


STRATEGIES = [
    _compression(
        "top_k",
        "the largest elements of a gradient; the rest is remembered",
        "梯度稀疏化, 误差反馈",
        "Stich, Cordonnier, Jaggi 2018, algorithm 1",
        "compression",
        top_k_worker,
        TopK,
        costs.top_k_bytes,
        share=0.2,
        example={"share": 0.01},
    ),
    _compression(
        "sign",
        "a bit per element and a scale; the rest is remembered",
        "符号梯度, 误差反馈",
        "Karimireddy et al. 2019, algorithm 1",
        "compression",
        sign_worker,
        Sign,
        costs.sign_bytes,
        limit=False,
    ),
    _compression(
        "int8",
        "8 bits per element, rounded at random",
        "随机量化",
        "Alistarh et al. 2017 (QSGD), sections 3.1, 4",
        "compression",
        int8_worker,
        Int8,
        costs.int8_bytes,
        limit=False,
    ),
    _compression(
        "power_sgd",
        "two thin matrices in place of a gradient",
        "低秩压缩",
        "Vogels, Karimireddy, Jaggi 2019, algorithms 1, 2",
        "power_sgd",
        power_sgd_worker,
        PowerSGD,
        costs.power_sgd_bytes,
        costs.power_sgd_costs,
        rank=2,
        example={"rank": 2},
    ),
]
