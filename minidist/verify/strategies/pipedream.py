"""Asynchronous pipelines: a stream of minibatches, trained and replayed."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.pipeline_parallel import PipeDream, programs
from minidist.pipeline_parallel.actions import Programs, Update, last_stage
from minidist.pipeline_parallel.partition import cut_of
from minidist.pipeline_parallel.stage import Stage
from minidist.planning.costs import strategies as costs
from minidist.planning.pipedream import options_of, pipedream
from minidist.replicas import fingerprint
from minidist.rng import generator
from minidist.verify.replays.pipedream import replay
from minidist.verify.strategies.cases import Case, collect, of_kind, transformer_example
from minidist.verify.strategies.job import Arrays, Job, OnLoss, Rule, by_name
from minidist.verify.strategies.pipeline_parallel import (
    cut_with_leaves,
    everyones,
    input_gradient,
    layers_limit,
)
from minidist.verify.strategies.record import LAYERS, Costs, Strategy
from minidist.verify.strategies.stream import momentum

STREAM = 20  # a rank's idle share is that of a stream this many times as long


class AsynchronousStages(Job):
    """A pipeline on a stream of minibatches, which is replayed; by default, on one minibatch.

    accumulates  whether an update sums `update_every` minibatches' gradients
    minibatches  the batch is cut into this many; the result is then the weights at the end
    """

    rule: Rule = staticmethod(momentum)
    trains = True

    def __init__(
        self,
        group: Group,
        case: Case,
        scheme: str,
        accumulates: bool = False,
        minibatches: int | None = None,
        **options,
    ):
        super().__init__(group, case, copy.deepcopy(case.model))
        self.whole = of_kind(nn.Sequential, case.model)
        self.scheme, self.minibatches, self.options = scheme, minibatches, options
        self.batch = cut_with_leaves(case, minibatches or 1)
        if minibatches:
            every = options.get("update_every") or max(1, group.size - 1)
            summed = every if accumulates else 1
            self.batch = [replace(b, total=b.total / minibatches * summed) for b in self.batch]

    def begin(self, rule: Rule) -> None:
        self.pipe = PipeDream(
            of_kind(nn.Sequential, self.model),
            self.group,
            rule,
            self.scheme,
            self.case.loss,
            **self.options,
        )
        self.model = self.pipe.model
        if self.pipe.stage.replicas is not None:
            self.groups.append(self.pipe.stage.replicas)

    def stages(self) -> list[Stage]:
        return [self.pipe.stage]

    def backward(self, on_loss: OnLoss) -> None:
        self.pipe.train(self.batch)

    def result(self) -> Arrays:
        if self.minibatches:
            no_input = replace(self.case, inputs=np.zeros(0, int))
            return everyones(self.group, self.model.state(), no_input)
        flat = self.pipe.stage.weights.flat
        mine = collect(self.model)  # zeros, of what is frozen, too: the updates dropped the rest
        mine |= by_name(flat, flat.gradient.copy())
        return everyones(self.group, mine | input_gradient(self.batch), self.case)

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        if not self.minibatches:
            return None, None
        case, pipe = self.case, self.pipe
        bare = pipe.programs_for(self.group.size, self.minibatches, **pipe.options)
        versions, updates = _versions(self.group, pipe, bare.placement), _updates(bare)
        start = self.whole, pipe.cut, self.batch
        want = replay(*start, versions, updates, momentum, case.loss)
        return want, _drifted(self.group, pipe)

    def kept(self) -> dict:
        weights = self.pipe.stage.weights
        old = [np.empty_like(weights.flat.vector) for _ in range(weights.most - 1)]
        return {"homes": [weights.flat], "optimizer": weights.optimizer, "parameters": old}


def _drifted(group: Group, pipe: PipeDream) -> str | None:
    """Return in words which stages' replicas hold different weights; every rank must call it."""
    own = fingerprint("weights", pipe.stage.weights.newest.weights)
    found = group.all_gather(np.array([own], np.uint64)).tolist()
    stages = [stage for (stage,) in pipe.programs_for(group.size, 1, **pipe.options).placement]
    drifted = {k for k, own in zip(stages, found, strict=True) if own != found[stages.index(k)]}
    if not drifted:
        return None
    return f"replicas of stages {sorted(drifted)} differ: their gradients were not summed"


def _versions(group: Group, pipe: PipeDream, placement) -> list[dict[int, int]]:
    """Return, per stage, the version that each minibatch's forward pass used."""
    used = np.array([(b, version) for letter, b, version in pipe.used if letter == "F"])
    counts = group.all_gather(np.array([len(used)]))
    everyones = np.split(group.all_gather(used.reshape(-1, 2)), np.cumsum(counts)[:-1])
    result: list[dict[int, int]] = [{} for _ in range(1 + last_stage(placement))]
    for (stage,), rows in zip(placement, everyones, strict=True):
        result[stage].update({int(b): int(version) for b, version in rows})
    return result


def _updates(programs: Programs) -> list[list[int]]:
    """Return, per stage, the minibatches after which it updates."""
    found = {stage: program for (stage,), program in zip(programs.placement, programs, strict=True)}
    return [[a.micro_batch for a in found[s] if isinstance(a, Update)] for s in sorted(found)]


def stream_bytes(case: Case, ranks: int) -> int:
    """Return the bytes of all minibatches together, and of the sums of a stage's replicas."""
    replicas = case.options.get("replicas") or [1] * ranks
    cut = cut_of(len(case.model.layers), len(replicas), case.options.get("cut"))
    return costs.replicated_bytes(case, cut, replicas, case.options.get("minibatches") or 1)


def stream_programs(schedule: str, case: Case, ranks: int) -> Programs:
    return programs(schedule, ranks, STREAM * case.options["minibatches"])


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
    """The cases of stream_cases, and a plan of PipeDream's planner, uneven, with replicas."""
    cases = stream_cases(ranks)
    profile = [(5, 0, 1), (4, 0, 1), *[(1, 0, 60)] * (ranks - 1)]
    stages, _ = pipedream(profile, ranks, 10)
    options = {"minibatches": 7} | options_of(stages)
    return [*cases, replace(cases[0], name="MLP, a plan with replicas", options=options)]


def _stream(*, name: str, scheme: str, accumulates=False, **fields) -> Strategy:
    """Return a record."""
    return Strategy(
        name=name,
        family="PipeDream",
        files=("pipeline_parallel/pipedream.py", "pipeline_parallel/weight_stashing.py"),
        lesson="09_pipedream",
        start=partial(AsynchronousStages, scheme=scheme, accumulates=accumulates),
        promise="replayed bitwise",
        models=LAYERS,
        costs=Costs(
            bytes=stream_bytes,
            limit=lambda case, ranks: layers_limit(case),
            cuts="layers",
            programs=partial(stream_programs, name),
            example=partial(transformer_example, minibatches=8),
        ),
        tests=("pipeline_parallel/test_pipedream.py",),
        **fields,
    )


STRATEGIES = [
    _stream(
        name="pipedream",
        idea="asynchronous, with weight stashing or vertical sync",
        term="异步流水, 权重暂存",
        paper="Narayanan et al. 2019, sections 3.2, 3.3",
        scheme="weight_stashing",
        cases=planned_cases,
    ),
    _stream(
        name="pipedream_2bw",
        idea="two versions of the weights",
        term="异步流水, 双缓冲权重",
        paper="Narayanan et al. 2021 (PipeDream-2BW), section 3.1",
        scheme="2bw",
        cases=stream_cases,
        accumulates=True,
    ),
]
