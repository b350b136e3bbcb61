"""Data parallelism that sends less: compressed gradients, with error feedback."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.backend import to_host
from minidist.comm import Group
from minidist.data_parallel.compression import Compressor, ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.planning.costs import strategies as costs
from minidist.rng import generator
from minidist.verify.replays import data_parallel as replays
from minidist.verify.strategies.cases import Case, small_cases, transformer_example
from minidist.verify.strategies.data_parallel import Replicas
from minidist.verify.strategies.job import Arrays, Job, Rule
from minidist.verify.strategies.record import Costs, Strategy
from minidist.verify.strategies.stream import Stream, momentum
from minidist.verify.watch import Watch


def top_k(group: Group, case: Case, share: float = 1.0, minibatches: int | None = None) -> Job:
    """Send `share` of each gradient's elements, the largest; by default all of them."""
    replayed = replays.dense_top_k(share)
    return compressed(group, case, TopK(share), replayed, minibatches, limit=share == 1)


def sign(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send the signs, and the mean size."""
    return compressed(group, case, Sign(), replays.dense_sign(), minibatches)


def int8(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send 8 bits per element, rounded at random."""
    return compressed(group, case, Int8(case.seed), replays.dense_int8(case.seed), minibatches)


def power_sgd(
    group: Group, case: Case, rank: int | None = None, minibatches: int | None = None
) -> Job:
    """Send matrices at this rank; by default at full rank, at which nothing is lost."""
    compress, replayed = PowerSGD(rank, case.seed), replays.dense_power_sgd(rank, case.seed)
    return compressed(group, case, compress, replayed, minibatches, limit=rank is None)


def compressed(
    group: Group,
    case: Case,
    compress: Compressor,
    replayed: replays.Dense,
    minibatches: int | None,
    limit: bool = False,
) -> Job:
    """Start a stream of minibatches; by default, one batch.

    replayed  the compressor of the replay
    limit     whether the ranks send all that they have: the result is one device's gradient
    """
    if minibatches:
        return CompressedStream(group, case, minibatches, compress, replayed)
    return CompressedBatch(group, case, compress, limit)


class CompressedBatch(Replicas):
    """One batch: the result is what the ranks have sent, plus what they remember."""

    def __init__(self, group: Group, case: Case, compress: Compressor, limit: bool):
        super().__init__(group, case, lambda *_: self.feedback.all_reduce_gradients())
        self.limit = limit
        self.feedback = ErrorFeedback(case.model, group, compress)

    def let_watch(self, watch: Watch) -> None:
        super().let_watch(watch)
        self.feedback.compress = watch.compressor(self.feedback.compress)

    def result(self) -> Arrays:
        found = super().result()
        if not self.limit:
            for name, error in self.feedback.errors.items():
                found[name] = found[name] + to_host(self.group.all_reduce(error))
        return found

    def kept(self) -> dict:
        q = getattr(self.feedback.compress, "q", {})
        return super().kept() | {"gradients": [*self.feedback.errors.values(), *q.values()]}


class CompressedStream(Stream):
    """A stream of minibatches; the result is the weights."""

    rule: Rule = staticmethod(momentum)

    def __init__(
        self,
        group: Group,
        case: Case,
        minibatches: int,
        compress: Compressor,
        replayed: replays.Dense,
    ):
        super().__init__(group, case, minibatches)
        self.feedback = ErrorFeedback(self.model, group, compress)
        self.replayed = replayed

    def update(self) -> None:
        self.feedback.all_reduce_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def replay(self) -> Arrays:
        return replays.replay_compressed(self.training, self.replayed, momentum)


def compressed_cases(ranks: int, limit: bool = True, **options) -> list[Case]:
    """Two streams; the limit in which nothing is left out, if there is one; other batches.

    options  of the compressor, beyond its limit
    """
    mlp, transformer, few, experts, _ = small_cases(ranks)
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


def _compression(
    *, file: str, costs: Costs, limit: bool = False, options: dict | None = None, **fields
) -> Strategy:
    """Return a record.

    limit    whether there is a limit in which nothing is left out
    options  of the compressor, beyond that limit
    fields   what the record has of its own
    """
    return Strategy(
        family="compression",
        lesson="19_fewer_bytes",
        files=(f"data_parallel/{file}.py",),
        promise="invariant",
        cases=partial(compressed_cases, limit=limit, **options or {}),
        costs=costs,
        tests=(f"data_parallel/test_{file}.py",),
        **fields,
    )


STRATEGIES = [
    _compression(
        name="top_k",
        idea="the largest elements of a gradient; the rest is remembered",
        term="梯度稀疏化, 误差反馈",
        paper="Stich, Cordonnier, Jaggi 2018, algorithm 1",
        file="compression",
        start=top_k,
        limit=True,
        options={"share": 0.2},
        costs=Costs(
            bytes=costs.top_k_bytes,
            example=partial(transformer_example, share=0.01),
        ),
    ),
    _compression(
        name="sign",
        idea="a bit per element and a scale; the rest is remembered",
        term="符号梯度, 误差反馈",
        paper="Karimireddy et al. 2019, algorithm 1",
        file="compression",
        start=sign,
        costs=Costs(bytes=costs.sign_bytes),
    ),
    _compression(
        name="int8",
        idea="8 bits per element, rounded at random",
        term="随机量化",
        paper="Alistarh et al. 2017 (QSGD), sections 3.1, 4",
        file="compression",
        start=int8,
        costs=Costs(bytes=costs.int8_bytes),
    ),
    _compression(
        name="power_sgd",
        idea="two thin matrices in place of a gradient",
        term="低秩压缩",
        paper="Vogels, Karimireddy, Jaggi 2019, algorithms 1, 2",
        file="power_sgd",
        start=power_sgd,
        limit=True,
        options={"rank": 2},
        costs=Costs(
            bytes=costs.power_sgd_bytes,
            example=partial(transformer_example, rank=2),
        ),
    ),
]
