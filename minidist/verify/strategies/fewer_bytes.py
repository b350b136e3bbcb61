"""Data parallelism that sends less: compressed gradients, weights as int8, local steps."""

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
from minidist.verify.replays import data_parallel as replays
from minidist.verify.strategies.cases import Case
from minidist.verify.strategies.job import Arrays, AtWork, Job, Rule, momentum
from minidist.verify.strategies.record import record

LR = 0.1
inner = partial(optim.AdamW, lr=0.01)
OUTER = 0.7, 0.9  # learning rate and momentum


def training_of(case: Case, batches: list[Batch], ranks: int) -> replays.Training:
    """Return the training that a replay repeats: gradients of each rank's share of each batch."""

    def again(model: nn.Module, step: int, rank: int) -> None:
        loss_of(model, batches[step].share(rank, ranks)).backward()

    return replays.Training(case.model, len(batches), ranks, again)


class Compressed(AtWork):
    """A stream of minibatches, or one batch: its result is what was sent plus what is remembered.

    replayed  the compressor of the replay
    limit     whether the ranks send all that they have: the result is one device's gradient
    """

    trainer: CompressedDataParallel

    def __init__(
        self,
        group: Group,
        case: Case,
        compress: Compressor,
        replayed: replays.Dense,
        minibatches: int | None,
        limit: bool = False,
    ):
        batches = case.minibatches(minibatches or 0)
        training = training_of(case, batches, group.size)
        replay = partial(replays.replay_compressed, training, replayed, momentum)
        make = partial(CompressedDataParallel, compress=compress)
        super().__init__(group, case, make, batches, replay, momentum)
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


def top_k(group: Group, case: Case, share: float = 1.0, minibatches: int | None = None) -> Job:
    """Send `share` of each gradient's elements, the largest; by default all of them."""
    return Compressed(
        group, case, TopK(share), replays.dense_top_k(share), minibatches, limit=share == 1
    )


def sign(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send the signs, and the mean size."""
    return Compressed(group, case, Sign(), replays.dense_sign(), minibatches)


def int8(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send 8 bits per element, rounded at random."""
    return Compressed(group, case, Int8(case.seed), replays.dense_int8(case.seed), minibatches)


def power_sgd(
    group: Group, case: Case, rank: int | None = None, minibatches: int | None = None
) -> Job:
    """Send matrices at this rank; by default at full rank, at which nothing is lost."""
    compress, replayed = PowerSGD(rank, case.seed), replays.dense_power_sgd(rank, case.seed)
    return Compressed(group, case, compress, replayed, minibatches, limit=rank is None)


def quantized(group: Group, case: Case, block: int = 1, minibatches: int | None = None) -> Job:
    """Train on a stream of minibatches; take one batch's gradient where nothing is lost.

    block  elements that share a scale: one that has its own keeps its value, up to rounding
    """
    batches = case.minibatches(minibatches or (0 if block == 1 else 1))
    training = training_of(case, batches, group.size)
    replay = partial(replays.replay_quantized_gather, training, momentum, block)
    return AtWork(group, case, partial(Zero, stage=3, block=block), batches, replay, momentum)


class OneStepAlone(DataParallel):
    """A round of one step that changes nothing; it leaves the sum of the gradients."""

    def sum_gradients(self) -> None:
        LocalSGD(self.model, self.group, lr=0.0, every=1).step()


def local_steps(
    group: Group, case: Case, every: int = 1, minibatches: int | None = None, diloco: bool = False
) -> Job:
    """Train alone for `every` minibatches, then meet; by default, one batch's gradient.

    diloco  AdamW inside and Nesterov momentum outside, in place of SGD and an average
    """
    if not minibatches:
        return AtWork(group, case, OneStepAlone)
    batches = case.minibatches(minibatches)
    return Rounds(group, case, batches, every, DiLoCo if diloco else LocalSGD)


def streamed_steps(
    group: Group,
    case: Case,
    every: int = 1,
    minibatches: int | None = None,
    fragments: int = 1,
    tau: int = 0,
    alpha: float = 0.5,
    bits: int | None = 4,
) -> Job:
    """Train alone; fragments of the layers meet in turn; by default, one batch's gradient."""
    if not minibatches:
        return AtWork(group, case, OneStepAlone)
    streams = {"fragments": fragments, "tau": tau, "alpha": alpha, "bits": bits}
    batches = case.minibatches(minibatches)
    return Rounds(group, case, batches, every, StreamingDiLoCo, **streams)


class Rounds(AtWork):
    """Steps that each rank takes alone, and then meets the others; the result is the weights.

    kind     LocalSGD, DiLoCo or StreamingDiLoCo; an optimizer inside is the latter two's alone
    streams  options of streaming DiLoCo
    """

    local: LocalSGD | DiLoCo

    def __init__(
        self, group: Group, case: Case, batches: list[Batch], every: int, kind: type, **streams
    ):
        training = training_of(case, batches, group.size)
        replay = partial(replays.replay_diloco, training, inner, every, OUTER, **streams)
        if kind is LocalSGD:
            replay = partial(replays.replay_local_sgd, training, LR, every)
        super().__init__(group, case, DataParallel, batches, replay, inner)
        self.every, self.kind, self.streams = every, kind, streams

    def begin(self, rule: Rule) -> None:
        super().begin(rule)
        if self.kind is LocalSGD:
            self.local = LocalSGD(self.model, self.group, LR, self.every)
        else:
            self.local = self.kind(
                self.model, self.group, self.optimizer, self.every, *OUTER, **self.streams
            )
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


STRATEGIES = [
    record("top_k", start=top_k, bytes=costs.top_k_bytes),
    record("sign", start=sign, bytes=costs.sign_bytes),
    record("int8", start=int8, bytes=costs.int8_bytes),
    record("power_sgd", start=power_sgd, bytes=costs.power_sgd_bytes),
    record("quantized_gather", start=quantized),
    record("local_sgd", start=local_steps, bytes=costs.local_sgd_bytes),
    record("streaming_diloco", start=streamed_steps),
]
