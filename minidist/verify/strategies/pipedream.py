"""Asynchronous pipelines: a stream of minibatches, trained and replayed.

The replay has no pipeline: one rank takes minibatch after minibatch, per stage the weights of the
recorded version, computes forward and backward, and applies the gradients to the newest weights.
The weights of a pipeline with weight stashing must equal the replay's bit for bit. So it runs on a
rank, with the same share of the cores and the same shapes.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.nn.datasets import Batch
from minidist.nn.flat_parameters import FlatParameters
from minidist.parallel import fingerprint, from_holders
from minidist.pipeline_parallel import PipeDream, programs
from minidist.pipeline_parallel.actions import Programs, Update, last_stage
from minidist.pipeline_parallel.holders import cut_of
from minidist.planning.costs import strategies as costs
from minidist.planning.pipedream import options_of, pipedream
from minidist.verify.strategies.cases import Case, collect, stream_cases
from minidist.verify.strategies.job import Arrays, Job, Rule, by_name, momentum
from minidist.verify.strategies.record import record

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
        self.scheme, self.minibatches, self.options = scheme, minibatches, options
        self.stream = [self.batch]
        if minibatches:
            every = options.get("update_every") or max(1, group.size - 1)
            summed = every if accumulates else 1
            cut = case.batch.micro_batches(minibatches)
            self.stream = [replace(b, total=b.total / minibatches * summed) for b in cut]

    def begin(self, rule: Rule) -> None:
        assert isinstance(self.model, nn.Sequential)
        self.pipe = PipeDream(
            self.model, self.group, rule, self.scheme, self.case.loss, **self.options
        )
        self.model, self.stages = self.pipe.model, [self.pipe.stage]
        if self.pipe.stage.replicas is not None:
            self.groups.append(self.pipe.stage.replicas)

    def backward(self) -> None:
        self.losses += self.pipe.train(self.stream).values()

    def result(self) -> Arrays:
        names = self.case.model.named_parameters()
        if self.minibatches:
            return from_holders(self.model.state(), names, self.group)
        flat = self.pipe.stage.weights.flat
        mine = collect(self.model)  # zeros, of what is frozen, too: the updates dropped the rest
        mine |= by_name(flat, flat.gradient.copy())
        return from_holders(mine, names, self.group) | self.input_gradient()

    def reference(self, result: Arrays) -> tuple[Arrays | None, str | None]:
        if not self.minibatches:
            return None, None
        case, pipe = self.case, self.pipe
        assert isinstance(case.model, nn.Sequential)
        bare = pipe.programs_for(self.group.size, self.minibatches, **pipe.options)
        versions, updates = _versions(self.group, pipe, bare.placement), _updates(bare)
        want = replay(case.model, pipe.cut, self.stream, versions, updates, momentum, case.loss)
        return want, _drifted(self.group, pipe)

    def kept(self) -> dict:
        weights = self.pipe.stage.weights
        old = [np.empty_like(weights.flat.vector) for _ in range(weights.most - 1)]
        return {"homes": [weights.flat], "optimizer": weights.optimizer, "parameters": old}


def replay(
    model: nn.Sequential,
    cut: list[range],
    minibatches: list[Batch],
    versions: list[dict[int, int]],
    updates: list[list[int]],
    optimizer: Callable,
    loss: Callable = nn.cross_entropy,
) -> dict[str, np.ndarray]:
    """Return the weights after all minibatches, by name; the model does not change.

    cut          layers per stage
    versions     per stage, {minibatch: the version that its forward and backward use}
    updates      per stage, the minibatches after whose backward the stage updates
    optimizer    parameters -> Optimizer
    """
    model = copy.deepcopy(model)
    stages = [[model.layers[i] for i in part] for part in cut]
    flats = [FlatParameters(_parameters(layers)) for layers in stages]
    optimizers = [optimizer(flat.parameters) for flat in flats]
    history = [[flat.vector.copy()] for flat in flats]
    for b, minibatch in enumerate(minibatches):
        for flat, old, version in zip(flats, history, versions, strict=True):
            flat.bind(old[version[b]])
        _forward_backward(stages, minibatch, loss)
        for flat, old, at, rule in zip(flats, history, updates, optimizers, strict=True):
            if b in at:
                flat.bind(old[-1].copy())
                rule.step()
                rule.zero_grad()
                old.append(flat.vector)
    for flat, old in zip(flats, history, strict=True):
        flat.bind(old[-1])
    return model.state()


def _forward_backward(stages: list[list[nn.Module]], minibatch: Batch, loss: Callable) -> None:
    """Compute the gradients; put a leaf between stages, as where the activation is a message."""
    x, ends = minibatch.inputs, list[tuple]()
    for layers in stages:
        begin = x if not ends else Tensor(x.data, requires_grad=True)
        x = begin if isinstance(begin, Tensor) or begin.dtype.kind in "iu" else Tensor(begin)
        for layer in layers:
            x = layer(x, minibatch)
        ends.append((begin, x))
    grad = None
    ends[-1] = ends[-1][0], loss(x, minibatch.targets, reduction_size=minibatch.total)
    for begin, end in reversed(ends):
        if end.requires_grad:  # else everything so far is frozen
            end.backward(grad)
        grad = begin.grad if isinstance(begin, Tensor) else None


def _parameters(layers: list[nn.Module]) -> list[nn.Parameter]:
    once = dict.fromkeys(p for layer in layers for p in layer.parameters())  # some may be tied
    return [p for p in once if p.requires_grad]


def _drifted(group: Group, pipe: PipeDream) -> str | None:
    """Return in words which stages' replicas hold different weights; every rank must call it."""
    mine = fingerprint("weights", pipe.stage.weights.newest.weights)
    prints = group.all_gather(np.array([mine], np.uint64)).tolist()
    stages = [stage for (stage,) in pipe.programs_for(group.size, 1, **pipe.options).placement]
    drifted = {k for k, of in zip(stages, prints, strict=True) if of != prints[stages.index(k)]}
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
    of = {stage: program for (stage,), program in zip(programs.placement, programs, strict=True)}
    return [[a.micro_batch for a in of[stage] if isinstance(a, Update)] for stage in sorted(of)]


def stream_bytes(case: Case, ranks: int) -> int:
    """Return the bytes of all minibatches together, and of the sums of a stage's replicas."""
    replicas = case.options.get("replicas") or [1] * ranks
    cut = cut_of(len(case.model.layers), len(replicas), case.options.get("cut"))
    return costs.replicated_bytes(case, cut, replicas, case.options.get("minibatches") or 1)


def planned_cases(ranks: int) -> list[Case]:
    """The cases of stream_cases, and a plan of PipeDream's planner, uneven, with replicas."""
    cases = stream_cases(ranks)
    profile = [(5, 0, 1), (4, 0, 1), *[(1, 0, 60)] * (ranks - 1)]
    stages, _ = pipedream(profile, ranks, 10)
    options = {"minibatches": 7} | options_of(stages)
    return [*cases, replace(cases[0], name="MLP, a plan with replicas", options=options)]


def stream_programs(case: Case, ranks: int, name: str) -> Programs:
    return programs(name, ranks, STREAM * case.options["minibatches"])


STRATEGIES = [
    record(
        "pipedream",
        start=partial(AsynchronousStages, scheme="weight_stashing", accumulates=False),
        cases=planned_cases,
        bytes=stream_bytes,
        programs=partial(stream_programs, name="pipedream"),
    ),
    record(
        "pipedream_2bw",
        start=partial(AsynchronousStages, scheme="2bw", accumulates=True),
        cases=stream_cases,
        bytes=stream_bytes,
        programs=partial(stream_programs, name="pipedream_2bw"),
    ),
]
