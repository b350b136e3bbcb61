"""Data parallelism that meets rarely: local SGD and DiLoCo."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.comm import Group
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.datasets import shard
from minidist.planning.costs import compression as costs
from minidist.tools import replay_data_parallel as replays
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import Case, Outcome, small_cases, transformer_example
from minidist.tools.strategies.compression import backward_of, replayed, streams
from minidist.tools.strategies.data_parallel import by_examples, replica_worker
from minidist.tools.strategies.record import Costs, Strategy

LR = 0.1
inner = partial(optim.AdamW, lr=0.01)
OUTER = {"lr": 0.7, "momentum": 0.9}


def local_sgd_worker(
    group: Group,
    case: Case,
    every: int = 1,
    minibatches: int | None = None,
    diloco: bool = False,
) -> Outcome:
    """Train alone for `every` minibatches, then meet; by default, one batch's gradient.

    diloco  AdamW inside and Nesterov momentum outside, in place of SGD and an average
    """
    if not minibatches:
        case.model.flatten(group.empty)
        return replica_worker(group, case, _one_step_alone)
    model, backward = copy.deepcopy(case.model), backward_of(case, minibatches, group.size)
    if diloco:
        local = DiLoCo(model, group, inner(model.parameters()), every, **OUTER)
    else:
        local = LocalSGD(model, group, LR, every)
    for step in range(minibatches):
        backward(model, step, group.rank)
        local.step()
        local.zero_grad()
    start = case.model, minibatches, group.size, backward
    if diloco:
        replay = partial(replays.replay_diloco, *start, inner, every, **OUTER)
        wrong = {
            "that forgets its outer momentum": partial(replay, keeps=False),
            "whose outer step goes back from where the ranks went": partial(replay, along=-1),
        }
    else:
        replay = partial(replays.replay_local_sgd, *start, LR, every)
        wrong = {
            f"with rounds of {n} steps": partial(replays.replay_local_sgd, *start, LR, n)
            for n in (every - 1, every + 1)
        } | {"whose local steps are N times too short": partial(replay, inside=LR)}
    return replayed(group, model, replay, wrong)


def _one_step_alone(model: nn.Module, group: Group) -> None:
    """Let a round be one step that changes nothing; it leaves the sum of the gradients."""
    LocalSGD(model, group, lr=0.0, every=1).step()


def local_sgd_cases(ranks: int) -> list[Case]:
    """Rounds of 1, 2 and 3 steps; DiLoCo; one step, whose gradient is one device's."""
    mlp, transformer = streams(ranks)

    def rounds(case: Case, every: int, name: str, **more) -> Case:
        return replace(case, name=name, options=case.options | {"every": every} | more)

    return [
        rounds(mlp, 3, "MLP, 2 rounds of 3 steps"),
        rounds(mlp, 1, "MLP, 6 rounds of 1 step"),
        rounds(transformer, 2, "Transformer, 2 rounds of 2 steps"),
        rounds(mlp, 2, "MLP, DiLoCo, 3 rounds", diloco=True),
        rounds(transformer, 2, "Transformer, DiLoCo, 2 rounds", diloco=True),
        *small_cases(ranks),
    ]


def local_step(group: Group, case: Case, watch: Watch) -> None:
    """A round of DiLoCo with AdamW, watched."""
    model, steps = case.model, case.options["minibatches"]
    homes, weights = [layer.flat for layer in model.layers], [p.data for p in model.parameters()]
    local = DiLoCo(model, group, adamw(model.parameters()), case.options["every"], **OUTER)
    watch.model(model)
    for rows in np.array_split(np.arange(len(case.inputs)), steps):
        mine = shard(rows, group.rank, group.size)
        total = nn.counted(case.targets[rows])
        y = case.loss(model(case.inputs[mine]), case.targets[mine], reduction_size=total)
        watch.graph(y, parameters=weights).backward()
        local.step()
        local.zero_grad()
    watch.sends(group)
    watch.holds(homes, local.inner, local.start)
    watch.kept["optimizer state"] += local.moments


STRATEGIES = [
    Strategy(
        name="local_sgd",
        idea="local steps, then an average of weights; DiLoCo",
        term="本地SGD, 周期性平均",
        paper="Stich 2019, algorithm 1; Douillard et al. 2023 (DiLoCo), algorithm 1",
        family="local steps",
        lesson="19_fewer_bytes",
        promise="invariant",
        split=by_examples,
        files=("data_parallel/local_sgd.py",),
        worker=local_sgd_worker,
        cases=local_sgd_cases,
        costs=Costs(
            costs.local_sgd_bytes,
            costs.local_sgd_costs,
            local_step,
            example=partial(transformer_example, minibatches=2, every=2),
        ),
        tests=("data_parallel/test_local_sgd.py",),
    ),
]
