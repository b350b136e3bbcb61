"""Data parallelism that sends less: compressed gradients, weights as int8, local steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from minidist import nn, optim
from minidist.backend import to_host
from minidist.comm import Group
from minidist.data_parallel.compression import Compressor, Int8, Sign, TopK
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.data_parallel.replicated import CompressedDataParallel, DataParallel
from minidist.data_parallel.streaming_diloco import StreamingDiLoCo
from minidist.data_parallel.zero import Zero
from minidist.nn.datasets import Batch
from minidist.parallel.trainer import loss_of
from minidist.planning.costs import strategies as costs
from minidist.rng import generator
from minidist.verify.replays import data_parallel as replays
from minidist.verify.strategies.cases import Case, small_cases, transformer_example
from minidist.verify.strategies.job import Arrays, AtWork, Job, Rule, Steps, momentum
from minidist.verify.strategies.record import LAYERS, Costs, record

LR = 0.1
inner = partial(optim.AdamW, lr=0.01)
OUTER = 0.7, 0.9  # learning rate and momentum
STREAMED = {"minibatches": 2, "every": 2, "fragments": 2, "tau": 1, "bits": 4}  # the example


def training_of(case: Case, batches: list[Batch], ranks: int) -> replays.Training:
    """Return what a replay repeats: the gradients of each rank's share of each batch."""

    def again(model: nn.Module, step: int, rank: int) -> None:
        loss_of(model, batches[step].share(rank, ranks)).backward()

    return replays.Training(case.model, len(batches), ranks, again)


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
    batches = case.minibatches(minibatches or 0)
    training = training_of(case, batches, group.size)
    replay = partial(replays.replay_compressed, training, replayed, momentum)
    return Compressed(group, case, batches, replay, compress, limit)


class Compressed(Steps):
    """The result of one batch is what the ranks have sent, plus what they remember."""

    trainer: CompressedDataParallel

    def __init__(
        self,
        group: Group,
        case: Case,
        batches: list[Batch],
        replay: Callable[[], Arrays],
        compress: Compressor,
        limit: bool,
    ):
        make = partial(CompressedDataParallel, compress=compress)
        super().__init__(group, case, make, batches, replay)
        self.limit = limit

    def result(self) -> Arrays:
        result = super().result()
        if not (self.trains or self.limit):
            for name, error in self.trainer.feedback.errors.items():
                result[name] = result[name] + to_host(self.group.all_reduce(error))
        return result

    def kept(self) -> dict:
        feedback = self.trainer.feedback
        q = getattr(feedback.compress, "q", {})
        return super().kept() | {"gradients": [*feedback.errors.values(), *q.values()]}


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


def quantized(group: Group, case: Case, block: int = 1, minibatches: int | None = None) -> Job:
    """Train on a stream of minibatches; take one batch's gradient where nothing is lost.

    block  elements that share a scale: one that has its own keeps its value, up to rounding
    """
    make = partial(Zero, stage=3, block=block)
    if block == 1 and not minibatches:
        return AtWork(group, case, make)
    batches = case.minibatches(minibatches or 1)
    training = training_of(case, batches, group.size)
    replay = partial(replays.replay_quantized_gather, training, momentum, block)
    return Steps(group, case, make, batches, replay)


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


class OneStepAlone(DataParallel):
    """A round of one step that changes nothing; it leaves the sum of the gradients."""

    def sum_gradients(self) -> None:
        LocalSGD(self.model, self.group, lr=0.0, every=1).step()


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
        return AtWork(group, case, OneStepAlone)
    batches = case.minibatches(minibatches)
    if fragments:
        streams = {"fragments": fragments, "tau": tau, "alpha": alpha, "bits": bits}
        return Rounds(group, case, batches, every, StreamingDiLoCo, **streams)
    return Rounds(group, case, batches, every, DiLoCo if diloco else LocalSGD)


class Rounds(Steps):
    """Steps that each rank takes alone, and then meets the others; the result is the weights.

    kind     LocalSGD, DiLoCo or StreamingDiLoCo; an optimizer inside is the latter two's alone
    streams  options of streaming DiLoCo
    """

    local: LocalSGD | DiLoCo

    def __init__(
        self, group: Group, case: Case, batches: list[Batch], every: int, kind: type, **streams
    ):
        training = training_of(case, batches, group.size)
        replay = partial(replays.replay_diloco, training, inner, every, *OUTER, **streams)
        if kind is LocalSGD:
            replay = partial(replays.replay_local_sgd, training, LR, every)
        super().__init__(group, case, DataParallel, batches, replay, inner)
        self.every, self.kind, self.streams = every, kind, streams

    def begin(self, rule: Rule) -> None:
        super().begin(rule)
        if self.kind is LocalSGD:
            self.local = LocalSGD(self.model, self.group, LR, self.every)
        else:
            about = self.model, self.group, self.optimizer, self.every, *OUTER
            self.local = self.kind(*about, **self.streams)
        if isinstance(self.local, StreamingDiLoCo):
            self.groups = [self.group, self.local.apart]

    def backward(self) -> None:
        for batch in self.batches:
            loss = loss_of(self.model, batch.share(self.group.rank, self.group.size))
            loss.backward()
            self.losses.append(loss.item())
            self.local.step()
            self.local.zero_grad()
        if isinstance(self.local, StreamingDiLoCo):
            self.local.end()

    def result(self) -> Arrays:
        if isinstance(self.local, StreamingDiLoCo):  # what ranks have in common; their own differ
            return self.local.state()
        return self.model.state()

    def kept(self) -> dict:
        kept = super().kept()
        if isinstance(self.local, DiLoCo):
            kept |= {"parameters": self.local.start, "state": self.local.moments}
        if isinstance(self.local, StreamingDiLoCo):
            kept |= {"gradients": self.local.came}
        return kept


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


STRATEGIES = [
    record(
        "top_k",
        start=top_k,
        cases=partial(compressed_cases, share=0.2),
        costs=Costs(bytes=costs.top_k_bytes, example=partial(transformer_example, share=0.01)),
    ),
    record(
        "sign",
        start=sign,
        cases=partial(compressed_cases, limit=False),
        costs=Costs(bytes=costs.sign_bytes),
    ),
    record(
        "int8",
        start=int8,
        cases=partial(compressed_cases, limit=False),
        costs=Costs(bytes=costs.int8_bytes),
    ),
    record(
        "power_sgd",
        start=power_sgd,
        cases=partial(compressed_cases, rank=2),
        costs=Costs(bytes=costs.power_sgd_bytes, example=partial(transformer_example, rank=2)),
    ),
    record(
        "quantized_gather",
        start=quantized,
        cases=quantized_cases,
        costs=Costs(example=partial(transformer_example, block=128)),
        models=LAYERS,
    ),
    record(
        "local_sgd",
        start=local_steps,
        cases=local_sgd_cases,
        costs=Costs(
            bytes=costs.local_sgd_bytes,
            example=partial(transformer_example, minibatches=2, every=2, diloco=True),
        ),
    ),
    record(
        "streaming_diloco",
        start=local_steps,
        cases=streaming_cases,
        costs=Costs(example=partial(transformer_example, **STREAMED), compared=False),
    ),
]
