"""ZeRO's stage 3 with weights that travel as int8, and the same training replayed on one device."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.zero import Zero
from minidist.verify.replays import data_parallel as replays
from minidist.verify.strategies.cases import Case, small_cases, transformer_example
from minidist.verify.strategies.compression import streams
from minidist.verify.strategies.data_parallel import Shards, kept_by
from minidist.verify.strategies.job import Arrays, Job, OnLoss, Rule
from minidist.verify.strategies.record import LAYERS, Costs, Strategy
from minidist.verify.strategies.stream import Stream, momentum


def quantized(group: Group, case: Case, block: int = 1, minibatches: int | None = None) -> Job:
    """Train on a stream of minibatches; take one batch's gradient where nothing is lost.

    block  elements that share a scale: one that has its own keeps its value, up to rounding
    """
    if block == 1 and not minibatches:
        return Shards(group, case, 3, block=block)
    return QuantizedStream(group, case, minibatches or 1, block)


class QuantizedStream(Stream):
    """A stream of minibatches; the result is the weights, as the shards have them."""

    rule: Rule = staticmethod(momentum)

    def __init__(self, group: Group, case: Case, minibatches: int, block: int):
        super().__init__(group, case, minibatches)
        self.block = block
        self.zero = Zero(self.model.flatten(group.empty), group, 3, block=block)
        self.groups = self.zero.groups

    def parameters(self) -> list[nn.Parameter]:
        return self.zero.parameters()

    def backward(self, on_loss: OnLoss) -> None:
        for step in range(len(self.cut)):
            self.zero.accumulate(on_loss(self.loss(self.model, step, self.group.rank)))
            self.zero.step(self.optimizer)

    def result(self) -> Arrays:
        return self.zero.state()

    def kept(self) -> dict:
        return super().kept() | kept_by(self.zero)

    def replay(self) -> Arrays:
        return replays.replay_quantized_gather(self.training, momentum, self.block)


def quantized_cases(ranks: int) -> list[Case]:
    """Two streams; one element per block, in which nothing is lost; batches in larger blocks."""
    mlp, transformer = streams(ranks)
    free = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2)
    transformer = replace(transformer, model=free)
    images, _, few, experts, *_ = small_cases(ranks)
    return [
        replace(mlp, options=mlp.options | {"block": 4}),
        replace(transformer, options=transformer.options | {"block": 16}),
        *(replace(c, name=f"{c.name}, nothing lost") for c in (images, experts)),
        replace(few, name="MLP, 2 examples, 1 step", options={"block": 5}),
    ]


STRATEGIES = [
    Strategy(
        name="quantized_gather",
        idea="ZeRO 3 whose weights travel as int8, with a scale for each block",
        term="量化参数聚合, 分块量化",
        paper="Wang et al. 2023 (ZeRO++), quantized weights (qwZ)",
        family="ZeRO",
        lesson="05_zero",
        promise="invariant",
        files=("data_parallel/quantized_gather.py",),
        start=quantized,
        cases=quantized_cases,
        costs=Costs(
            example=partial(transformer_example, block=128),
        ),
        models=LAYERS,
        tests=("data_parallel/test_quantized_gather.py",),
    )
]
