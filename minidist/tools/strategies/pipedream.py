"""Asynchronous pipelines: a stream of minibatches, trained and replayed."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.comm import Group
from minidist.pipeline_parallel import PipeDream, programs
from minidist.pipeline_parallel.actions import Programs, Update, last_stage
from minidist.pipeline_parallel.micro_batch import micro_batches
from minidist.pipeline_parallel.partition import cut_of
from minidist.planning.costs import pipeline_parallel as costs
from minidist.planning.costs.cost import Cost
from minidist.planning.pipedream import options_of, pipedream
from minidist.replicas import fingerprint
from minidist.rng import generator
from minidist.tools.causes import cause_of
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.replay import replay
from minidist.tools.strategies.cases import (
    Case,
    Outcome,
    Split,
    bytes_sent,
    collect,
    transformer_example,
)
from minidist.tools.strategies.pipeline_parallel import (
    cut_with_leaves,
    everyones,
    input_gradient,
    names_of,
)
from minidist.tools.strategies.record import LAYERS, Costs, Strategy

STREAM = 20  # useful_share is computed for a stream this many times as long


def pipedream_worker(
    group: Group,
    case: Case,
    scheme: str,
    accumulates: bool = False,
    minibatches: int | None = None,
    **options,
) -> Outcome:
    """Train on a stream of minibatches and replay it; by default, one minibatch's gradient.

    accumulates  whether an update sums `update_every` minibatches' gradients
    minibatches  the batch is cut into this many; the outcome is then the weights at the end
    """
    every = options.get("update_every") or max(1, group.size - 1)
    batch = cut_with_leaves(case, minibatches or 1)
    per_update = every if accumulates else 1
    if minibatches:
        batch = [replace(part, total=part.total / minibatches * per_update) for part in batch]
    model = copy.deepcopy(case.model)
    pipe = PipeDream(model, group, momentum, scheme, case.loss, **options)
    pipe.train(batch)
    moved = bytes_sent(*[g for g in (group, pipe.stage.replicas) if g is not None])
    sent = {"bytes": moved.total(), "operations": dict(moved)}
    if not minibatches:
        flat = pipe.stage.weights.flat
        views = flat.views(flat.gradient)
        mine = collect(pipe.model)  # zeros, of what is frozen, too: the updates dropped the rest
        mine |= {p.name: g.copy() for p, g in zip(flat.parameters, views, strict=True)}
        return Outcome(everyones(group, mine | input_gradient(batch), case), **sent)
    weights = everyones(group, pipe.model.state(), replace(case, inputs=np.zeros(0, int)))
    bare = pipe.programs_for(group.size, minibatches, **pipe.options)
    versions, updates = _versions(group, pipe, bare.placement), _updates(bare)
    want = replay(case.model, pipe.cut, batch, versions, updates, momentum, case.loss)
    said = _drifted(group, pipe)
    if said is None and any(not np.array_equal(weights[name], w) for name, w in want.items()):
        said = cause_of.replays(weights, _others(case, pipe, batch, versions, updates))
    return Outcome(weights, **sent, reference=want, used=pipe.used, said=said)


def _drifted(group: Group, pipe: PipeDream) -> str | None:
    """Say which stages' replicas hold different weights; every rank has to ask."""
    own = fingerprint("weights", pipe.stage.weights.newest.weights)
    found = group.all_gather(np.array([own], np.uint64)).tolist()
    stages = [stage for (stage,) in pipe.programs_for(group.size, 1, **pipe.options).placement]
    drifted = {k for k, own in zip(stages, found, strict=True) if own != found[stages.index(k)]}
    if not drifted:
        return None
    return f"replicas of stages {sorted(drifted)} differ: their gradients were not summed"


def _others(case: Case, pipe: PipeDream, batch, versions, updates) -> dict:
    """Return {what is different about it: a replay that is not the one that should be}."""

    def shifted(by: int) -> list[dict[int, int]]:
        return [{b: max(0, v + by) for b, v in mine.items()} for mine in versions]

    start = case.model, pipe.cut, batch
    return {
        f"with versions {by:+d} of those recorded": partial(
            replay, *start, shifted(by), updates, momentum, case.loss
        )
        for by in (-1, 1)
    } | {"that updates twice": partial(replay, *start, versions, updates, twice, case.loss)}


class TwiceSGD(optim.SGD):
    """Takes every step twice: a mistake, with which a replay is compared."""

    def step(self) -> None:
        super().step()
        super().step()


RATES = {"lr": 0.1, "momentum": 0.9}
momentum = partial(optim.SGD, **RATES)
twice = partial(TwiceSGD, **RATES)


def _versions(group: Group, pipe: PipeDream, placement) -> list[dict[int, int]]:
    """Return, per stage, the version that each minibatch's forward pass used."""
    used = np.array([(b, version) for letter, b, version in pipe.used if letter == "F"])
    counts = group.all_gather(np.array([len(used)]))
    everyones = np.split(group.all_gather(used.reshape(-1, 2)), np.cumsum(counts)[:-1])
    result = [{} for _ in range(1 + last_stage(placement))]
    for (stage,), rows in zip(placement, everyones, strict=True):
        result[stage].update({int(b): int(version) for b, version in rows})
    return result


def _updates(programs: Programs) -> list[list[int]]:
    """Return, per stage, the minibatches after which it updates."""
    found = {stage: program for (stage,), program in zip(programs.placement, programs, strict=True)}
    return [[a.micro_batch for a in found[s] if isinstance(a, Update)] for s in sorted(found)]


def by_layers_of_a_stream(case: Case, ranks: int) -> Split:
    return Split(stages=names_of(case, cut_of(len(case.model.layers), ranks)))


def stream_bytes(case: Case, ranks: int) -> int:
    """Return the bytes of all minibatches together, and of the sums of a stage's replicas."""
    replicas = case.options.get("replicas") or [1] * ranks
    cut = cut_of(len(case.model.layers), len(replicas), case.options.get("cut"))
    return costs.replicated_bytes(case, cut, replicas, case.options.get("minibatches") or 1)


def stream_cases(ranks: int) -> list[Case]:
    """Minibatches of uneven sizes in a row, with momentum; and one alone, at version 0."""
    random = generator(0, "stream cases")
    mlp = nn.MLP(
        [6, *(5 + i % 3 for i in range(ranks)), 3], activation="gelu", seed=1, dtype="float64"
    )
    transformer = nn.Transformer(11, 8, 2, ranks, 5, seed=2, dtype="float64", dropout=0.2)
    images, labels = random.standard_normal((26, 6)), random.integers(0, 3, 26)
    tokens, nexts = random.integers(0, 11, (2, 12, 5))
    return [
        Case("MLP, 11 minibatches", mlp, images, labels, options={"minibatches": 11}),
        Case("Transformer, 6 minibatches", transformer, tokens, nexts, options={"minibatches": 6}),
        Case("MLP, 1 minibatch", mlp, images, labels),
    ]


def planned_cases(ranks: int) -> list[Case]:
    """The same, and a plan of PipeDream's planner: stages of uneven lengths, some with replicas."""
    cases = stream_cases(ranks)
    profile = [(5, 0, 1), (4, 0, 1), *[(1, 0, 60)] * (ranks - 1)]
    stages, _ = pipedream(profile, ranks, 10)
    options = {"minibatches": 7} | options_of(stages)
    return [*cases, replace(cases[0], name="MLP, a plan with replicas", options=options)]


def stream_example(ranks: int) -> Case:
    return transformer_example(ranks, minibatches=8)


def stream_costs(case: Case, ranks: int, schedule: str, versions) -> list[Cost]:
    m = case.options["minibatches"]
    return costs.pipeline_costs(case, programs(schedule, ranks, m), m, versions=versions)


def stream_useful_share(case: Case, ranks: int, schedule: str) -> float:
    m = case.options["minibatches"]
    order = programs(schedule, ranks, STREAM * m)
    return costs.pipeline_useful_share(case, order, m, ranks, rounds=STREAM)


def stream_limit(case: Case, ranks: int) -> tuple[int, str]:
    return costs.layers_limit(case, 1)


def stream_step(group: Group, case: Case, watch: Watch, scheme: str) -> None:
    """Train on the case's minibatches with AdamW, watched."""
    pipe = PipeDream(case.model, group, adamw, scheme, case.loss)
    watch.stages([pipe.stage], pipe.model)
    pipe.train(micro_batches(case.inputs, case.targets, case.options["minibatches"]))
    watch.sends(group)
    weights = pipe.stage.weights
    old = [np.empty_like(weights.flat.vector) for _ in range(weights.most - 1)]
    watch.holds([weights.flat], weights.optimizer, old)


def _stream(
    name: str, idea: str, term: str, paper: str, scheme: str, versions, cases, **more
) -> Strategy:
    """versions: (p, r) -> versions of its weights that rank r of p holds."""
    return Strategy(
        name=name,
        idea=idea,
        term=term,
        paper=paper,
        family="PipeDream",
        files=("pipeline_parallel/pipedream.py", "pipeline_parallel/weight_stashing.py"),
        lesson="09_pipedream",
        worker=partial(pipedream_worker, scheme=scheme, **more),
        promise="replayed bitwise",
        cases=cases,
        models=LAYERS,
        costs=Costs(
            stream_bytes,
            partial(stream_costs, schedule=name, versions=versions),
            partial(stream_step, scheme=scheme),
            stream_limit,
            "layers",
            partial(stream_useful_share, schedule=name),
            stream_example,
        ),
        split=by_layers_of_a_stream,
        tests=("pipeline_parallel/test_pipedream.py",),
    )


STRATEGIES = [
    _stream(
        "pipedream",
        "asynchronous, with weight stashing or vertical sync",
        "异步流水, 权重暂存",
        "Narayanan et al. 2019, sections 3.2, 3.3",
        "weight_stashing",
        lambda p, r: p - r,
        planned_cases,
    ),
    _stream(
        "pipedream_2bw",
        "two versions of the weights",
        "异步流水, 双缓冲权重",
        "Narayanan et al. 2021 (PipeDream-2BW), section 3.1",
        "2bw",
        lambda p, r: 2,
        stream_cases,
        accumulates=True,
    ),
]
