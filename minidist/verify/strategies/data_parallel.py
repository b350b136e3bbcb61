"""Data parallelism: every rank holds the model, or a shard of it, and some of the examples."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.data_parallel import bucketed, naive, zero
from minidist.datasets import shard
from minidist.planning.costs import strategies as costs
from minidist.verify.strategies.cases import (
    Case,
    collect,
    dual_case,
    small_cases,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.job import Arrays, Job, OnLoss, Rule, no_change
from minidist.verify.strategies.record import ANY, LAYERS, Costs, Strategy


class Dealt(Job):
    """A batch whose examples are dealt to ranks, and on each rank to micro-batches.

    inputs  of the micro-batches; leaves if they are floats, so that their gradients are kept
    """

    def __init__(self, group: Group, case: Case, micro_batches: int = 1):
        super().__init__(group, case, case.model)
        mine = shard(np.arange(len(case.inputs)), group.rank, group.size)
        self.parts = np.array_split(mine, micro_batches)
        self.inputs: list[Tensor | np.ndarray] = []

    def loss(self, examples: np.ndarray) -> Tensor:
        """Return the loss of some examples; keep their inputs."""
        self.inputs.append(x := self.case.part(examples))
        return self.case.loss_of(self.model, x, examples)

    def result(self) -> Arrays:
        return collect(self.model) | self.input_gradient(*self.inputs)


class Replicas(Dealt):
    """Every rank has the model; `reduce` makes the ranks' gradients their sum, on every rank."""

    def __init__(
        self,
        group: Group,
        case: Case,
        reduce: Callable[[nn.Module, Group], None],
        micro_batches: int = 1,
    ):
        super().__init__(group, case, micro_batches)
        self.reduce = reduce

    def backward(self, on_loss: OnLoss) -> None:
        for part in self.parts:
            on_loss(self.loss(part)).backward()
        self.reduce(self.model, self.group)


class Buckets(Dealt):
    """The last micro-batch's backward reduces, in buckets of `cap` bytes."""

    def __init__(self, group: Group, case: Case, micro_batches: int = 1, cap: int = 300):
        super().__init__(group, case, micro_batches)
        self.reducer = bucketed.Bucketed(case.model.flatten(group.empty), group, cap)
        self.groups = [self.reducer.group]

    def backward(self, on_loss: OnLoss) -> None:
        *first, last = self.parts
        for part in first:
            on_loss(self.loss(part)).backward()
        loss = on_loss(self.loss(last))
        with self.reducer.reduce():
            loss.backward()


class Shards(Dealt):
    """ZeRO: every rank keeps a part of what all need."""

    rule: Rule = staticmethod(no_change)

    def __init__(
        self,
        group: Group,
        case: Case,
        stage: int = 3,
        micro_batches: int = 1,
        shards: int | None = None,
        block: int | None = None,
    ):
        super().__init__(group, case, micro_batches)
        self.zero = zero.Zero(case.model.flatten(group.empty), group, stage, shards, block=block)
        self.groups = self.zero.groups

    def parameters(self) -> list[nn.Parameter]:
        return self.zero.parameters()

    def backward(self, on_loss: OnLoss) -> None:
        for part in self.parts:
            self.zero.accumulate(on_loss(self.loss(part)), last=part is self.parts[-1])

    def step(self) -> None:
        self.zero.step(self.optimizer)

    def result(self) -> Arrays:
        unsummed = super().result()  # zeros of what is frozen, and running statistics
        return unsummed | self.zero.copies.gradients()

    def kept(self) -> dict:
        return super().kept() | kept_by(self.zero)


def kept_by(share: zero.Zero) -> dict:
    """Return what ZeRO keeps from step to step, whole or cut: arguments of `Watch.holds`."""
    homes = [home for s in share.shards for home in (s.whole, s.part)]
    gradients, weights = share.copies.buffers[:1], share.copies.buffers[1:]
    return {"homes": homes, "parameters": weights, "gradients": gradients}


def replica_cases(ranks: int) -> list[Case]:
    """The small cases, a Seq2Seq, and two that are trained together."""
    return [*small_cases(ranks), translator_case(), dual_case()]


def zero_cases(ranks: int, stage: int) -> list[Case]:
    """The cases of replicas, and two micro-batches; in stage 3 the Transformer is not tied.

    From stage 2 on no nn.Dual: it is no composition of layers.
    """
    cases = [*small_cases(ranks), translator_case()] if stage > 1 else replica_cases(ranks)
    if stage == 3:
        free = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2)
        cases[1] = replace(cases[1], model=free)
    two = replace(cases[0], name="MLP, 2 micro-batches", options={"micro_batches": 2})
    return [*cases, two]


def hierarchical_cases(ranks: int) -> list[Case]:
    """Every stage, and every number of ranks that can share one of two copies or more."""
    found = []
    for k in [k for k in range(1, ranks) if ranks % k == 0] or [1]:
        for stage in (1, 2, 3):
            *cases, two = zero_cases(ranks, stage)
            for case in (cases[stage % 2], two):
                options = case.options | {"stage": stage, "shards": k}
                name = f"{case.name}, stage {stage}, copies of {k}"
                found.append(replace(case, name=name, options=options))
    return found


def hierarchical_example(ranks: int) -> Case:
    """Return the example on two hosts, if the ranks make up two."""
    shards = ranks if ranks % 2 else ranks // 2
    return transformer_example(ranks, stage=3, shards=shards)


naive_replicas = partial(Replicas, reduce=naive.all_reduce_gradients)
SUMS = Costs(bytes=costs.data_parallel_bytes)


def _zero(stage: int, idea: str, term: str) -> Strategy:
    return Strategy(
        name=f"zero_{stage}",
        idea=idea,
        term=term,
        paper=f"Rajbhandari et al. 2020, section 5.{stage}",
        family="ZeRO",
        files=("data_parallel/zero.py",),
        lesson="05_zero",
        start=partial(Shards, stage=stage),
        cases=partial(zero_cases, stage=stage),
        costs=Costs(
            bytes=partial(costs.zero_bytes, stage=stage),
        ),
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
        start=naive_replicas,
        cases=replica_cases,
        costs=SUMS,
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
        start=Buckets,
        cases=replica_cases,
        costs=replace(SUMS, example=partial(transformer_example, cap=1 << 20)),
        tests=("data_parallel/test_bucketed.py",),
    ),
    _zero(1, "the optimizer's state sharded", "参数切分: 优化器状态"),
    _zero(2, "the optimizer's state and the gradients sharded", "参数切分: 梯度"),
    _zero(3, "all sharded; the parameters are gathered layer by layer", "参数切分: 参数"),
    Strategy(
        name="hierarchical_zero",
        idea="sharded inside hosts, copies between them: a sum in two hops",
        term="分层参数切分: 主机内切分, 主机间复制",
        paper="Zhang et al. 2022 (MiCS); hybrid sharding in PyTorch (HSDP)",
        family="ZeRO",
        files=("data_parallel/hierarchical_zero.py",),
        lesson="05_zero",
        start=partial(Shards, block=None),
        cases=hierarchical_cases,
        costs=Costs(
            bytes=costs.zero_bytes,
            example=hierarchical_example,
            compared=False,  # its gain is on links of two speeds
        ),
        ranks=(1, 2, 3, 4, 8),
        models=LAYERS,
        tests=("data_parallel/test_hierarchical_zero.py",),
    ),
]
