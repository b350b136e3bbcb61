"""Data parallelism that meets rarely: local SGD, DiLoCo, and DiLoCo in fragments."""

from dataclasses import replace
from functools import partial

from minidist import nn, optim
from minidist.comm import Group
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.streaming_diloco import StreamingDiLoCo
from minidist.planning.costs import strategies as costs
from minidist.verify.replays import data_parallel as replays
from minidist.verify.strategies.cases import Case, small_cases, transformer_example
from minidist.verify.strategies.compression import streams
from minidist.verify.strategies.data_parallel import Replicas
from minidist.verify.strategies.job import Arrays, Job, OnLoss, Rule
from minidist.verify.strategies.record import Costs, Strategy
from minidist.verify.strategies.stream import Stream

LR = 0.1
inner = partial(optim.AdamW, lr=0.01)
OUTER = 0.7, 0.9  # learning rate and momentum


def local_steps(
    group: Group,
    case: Case,
    every: int = 1,
    minibatches: int | None = None,
    diloco: bool = False,
    fragments: int = 0,
    tau: int = 0,
    alpha: float = 0.5,
    bits: int | None = 4,
) -> Job:
    """Train alone for `every` minibatches, then meet; by default, one batch's gradient.

    diloco     AdamW inside and Nesterov momentum outside, in place of SGD and an average
    fragments  of streaming DiLoCo, which has the options after it; 0: all layers meet at once
    """
    if not minibatches:
        case.model.flatten(group.empty)
        return Replicas(group, case, _one_step_alone)
    if fragments:
        streams = {"fragments": fragments, "tau": tau, "alpha": alpha, "bits": bits}
        return Fragments(group, case, minibatches, every, **streams)
    return (OuterSteps if diloco else LocalSteps)(group, case, minibatches, every)


class LocalSteps(Stream):
    """Rounds of local SGD; an optimizer inside is DiLoCo's alone."""

    rule: Rule = staticmethod(inner)
    local: LocalSGD | DiLoCo

    def __init__(self, group: Group, case: Case, minibatches: int, every: int):
        super().__init__(group, case, minibatches)
        self.every = every

    def begin(self, rule: Rule) -> None:
        self.local = LocalSGD(self.model, self.group, LR, self.every)

    def update(self) -> None:
        self.local.step()
        self.local.zero_grad()

    def replay(self) -> Arrays:
        return replays.replay_local_sgd(self.training, LR, self.every)


class OuterSteps(LocalSteps):
    """Rounds of DiLoCo.

    streams  options of streaming DiLoCo
    """

    local: DiLoCo

    def __init__(self, group: Group, case: Case, minibatches: int, every: int, **streams):
        super().__init__(group, case, minibatches, every)
        self.streams = streams

    def begin(self, rule: Rule) -> None:
        super(LocalSteps, self).begin(rule)
        self.local = DiLoCo(self.model, self.group, self.optimizer, self.every, *OUTER)

    def replay(self) -> Arrays:
        return replays.replay_diloco(self.training, inner, self.every, *OUTER, **self.streams)

    def kept(self) -> dict:
        kept = {"parameters": self.local.start, "state": self.local.moments}
        return super().kept() | kept


class Fragments(OuterSteps):
    """Streaming DiLoCo; the result is the common weights."""

    local: StreamingDiLoCo

    def begin(self, rule: Rule) -> None:
        super(LocalSteps, self).begin(rule)
        about = self.model, self.group, self.optimizer, self.every, *OUTER
        self.local = StreamingDiLoCo(*about, **self.streams)
        self.groups = [self.group, self.local.apart]

    def backward(self, on_loss: OnLoss) -> None:
        super().backward(on_loss)
        self.local.end()

    def result(self) -> Arrays:
        return self.local.state()

    def kept(self) -> dict:
        return super().kept() | {"gradients": self.local.came}


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


def streaming_cases(ranks: int) -> list[Case]:
    """Fragments in turn, applied 0 to 2 steps later, in four bits or all; one step's gradient."""
    mlp, transformer = streams(ranks)

    def fragments(case: Case, words: str, *values) -> Case:
        asked = zip(("every", "fragments", "tau", "alpha", "bits"), values, strict=True)
        return replace(case, name=f"{case.name}, {words}", options=case.options | dict(asked))

    return [
        fragments(mlp, "3 fragments, 1 step later", 3, 3, 1, 0.5, 4),
        fragments(mlp, "2 fragments, 2 steps later, all bits", 4, 2, 2, 0.25, None),
        fragments(mlp, "2 fragments, at once", 2, 2, 0, 0.0, 4),
        fragments(transformer, "2 fragments, 1 step later", 2, 2, 1, 0.75, 4),
        *small_cases(ranks),
    ]


_record = partial(
    Strategy,
    family="local steps",
    lesson="19_fewer_bytes",
    start=local_steps,
    promise="invariant",
)
STRATEGIES = [
    _record(
        name="local_sgd",
        idea="local steps, then an average of weights; DiLoCo",
        term="本地SGD, 周期性平均",
        paper="Stich 2019, algorithm 1; Douillard et al. 2023 (DiLoCo), algorithm 1",
        files=("data_parallel/local_sgd.py",),
        cases=local_sgd_cases,
        costs=Costs(
            bytes=costs.local_sgd_bytes,
            example=partial(transformer_example, minibatches=2, every=2, diloco=True),
        ),
        tests=("data_parallel/test_local_sgd.py",),
    ),
    _record(
        name="streaming_diloco",
        idea="fragments of layers meet in turn, in four bits, and are applied some steps later",
        term="流式DiLoCo, 分片交替同步",
        paper="Douillard et al. 2025 (Streaming DiLoCo), algorithm 2",
        files=("data_parallel/streaming_diloco.py",),
        cases=streaming_cases,
        costs=Costs(
            example=partial(
                transformer_example, minibatches=2, every=2, fragments=2, tau=1, bits=4
            ),
            compared=False,
        ),
        tests=("data_parallel/test_streaming_diloco.py",),
    ),
]
