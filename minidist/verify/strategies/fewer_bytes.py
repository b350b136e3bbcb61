"""Data parallelism that sends less: compressed gradients, weights as int8, local steps.

Each is compared with a replay: one device repeats the work of all ranks, without messages. It
computes rank after rank the same gradients, what each rank would send, what it would remember, and
the sums in rank order. Its weights at the end must be the ranks' bit for bit. So it runs on a rank,
with the same share of the cores and the same shapes.

Dense: a compressor as a function of all ranks' v at once, (vs, parameter, step) -> (the sum of what
is sent, per rank what is left out).
"""

import copy
from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise
from operator import add
from typing import NamedTuple

from minidist import nn, optim
from minidist.backend import Array, array_module, to_host
from minidist.comm import Group
from minidist.data_parallel.compression import LEVELS, Compressor, Int8, Sign, TopK, on_grid
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.power_sgd import PowerSGD, orthogonalize
from minidist.data_parallel.replicated import CompressedDataParallel, DataParallel
from minidist.data_parallel.streaming_diloco import StreamingDiLoCo
from minidist.data_parallel.zero import Zero
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch
from minidist.parallel import norms_that_train
from minidist.parallel.trainer import loss_of
from minidist.pieces import split_ends
from minidist.planning.costs import strategies as costs
from minidist.rng import digest, hash_uniform
from minidist.verify.strategies.cases import Case
from minidist.verify.strategies.job import Arrays, AtWork, Job, Rule, momentum
from minidist.verify.strategies.record import record

Dense = Callable[[list[Array], nn.Parameter, int], tuple[Array, list[Array]]]


class Training(NamedTuple):
    """A training that a replay repeats, on copies of the model.

    batches  one for each step; every rank has its share of it
    """

    model: nn.Module
    batches: list[Batch]
    ranks: int

    def backward(self, model: nn.Module, step: int, rank: int) -> None:
        """Add the gradient of a rank's share of a batch to the model's gradients.

        ValueError: the model has batch norms that train on several ranks.
        """
        for norm in norms_that_train(model) if self.ranks > 1 else ():
            raise WrongInput(
                f"{norm.name} needs the statistics of the whole batch, and a replay takes one "
                "rank's share after another; certify one gradient, or use model.eval()"
            )
        loss_of(model, self.batches[step].share(rank, self.ranks)).backward()

    def gradients(self, model: nn.Module, step: int, rank: int) -> list[Array]:
        """Return copies of a rank's gradients of what is trained; zeros where it has none."""
        self.backward(model, step, rank)
        trained = _trained(model)
        copies = [p.xp.zeros_like(p.data) if p.grad is None else p.grad.copy() for p in trained]
        model.zero_grad()
        return copies

    def of_ranks(self, model: nn.Module, step: int) -> list[list[Array]]:
        return [self.gradients(model, step, rank) for rank in range(self.ranks)]


def replay_compressed(training: Training, dense: Dense, optimizer: Callable) -> dict[str, Array]:
    """Return the weights after all steps, by name."""
    model = copy.deepcopy(training.model)
    rule, trained = optimizer(model.parameters()), _trained(model)
    owed = [[0.0] * training.ranks for _ in trained]
    for step in range(len(training.batches)):
        gradients = zip(*training.of_ranks(model, step), strict=True)
        for i, (p, of_ranks) in enumerate(zip(trained, gradients, strict=True)):
            vs = [g.astype("float64") + e for g, e in zip(of_ranks, owed[i], strict=True)]
            p.grad, owed[i] = dense(vs, p, step)
        rule.step()
        rule.zero_grad()
    return model.state()


def dense_top_k(share: float) -> Dense:
    def dense(vs, p, step):
        xp, total = array_module(*vs), p.xp.zeros(p.size, p.dtype)
        k = max(1, int(share * p.size))
        for v in (v.reshape(-1) for v in vs):
            places = xp.argpartition(abs(v), v.size - k)[v.size - k :]
            total[places] += v[places].astype(p.dtype)
            v[places] -= v[places].astype(p.dtype)
        return total.reshape(p.shape), vs

    return dense


def dense_sign() -> Dense:
    def dense(vs, p, step):
        pairs = [on_grid(v, abs(v.reshape(-1)).mean().reshape(1)) for v in vs]
        sent = [_signs(v) * scale for v, scale in pairs]
        rest = [v - own for (v, _), own in zip(pairs, sent, strict=True)]
        return reduce(add, sent).astype(p.dtype), rest

    return dense


def dense_int8(seed: int) -> Dense:
    def dense(vs, p, step):
        sent, rest = [], []
        for r, v in enumerate(vs):
            xp = array_module(v)
            v, level = on_grid(v, (abs(v).max() / LEVELS).reshape(1))
            key = digest(seed, step, r, p.name)
            draws = hash_uniform(key, xp.arange(v.size, dtype="uint64")).reshape(v.shape)
            number = abs(v) / xp.where(level > 0, level, 1.0) + draws
            number = xp.minimum(number, LEVELS).astype("int64").astype("float64")
            sent.append(_signs(v) * number * level)
            rest.append(v - sent[-1])
        return reduce(add, sent).astype(p.dtype), rest

    return dense


def dense_power_sgd(rank: int | None, seed: int = 0) -> Dense:
    """PowerSGD: a step begins with the Q of the step before."""
    begin = PowerSGD(rank, seed).begin
    qs: dict[str, Array] = {}

    def dense(vs, p, step):
        if vs[0].ndim < 2:
            return reduce(add, [v.astype(p.dtype) for v in vs]), [0.0] * len(vs)
        matrices = [v.reshape(len(v), -1) for v in vs]
        q = begin(qs.get(p.name), matrices[0], p, step)
        left = reduce(add, [(m @ q).astype(p.dtype) for m in matrices])
        left = orthogonalize(left.astype("float64"))
        parts = [(m.T @ left).astype(p.dtype) for m in matrices]
        qs[p.name] = reduce(add, parts)
        total = (left @ qs[p.name].T).astype(p.dtype).reshape(p.shape)
        sent = [(left @ part.T).reshape(p.shape) for part in parts]
        pairs = [on_grid(v, part) for v, part in zip(vs, sent, strict=True)]
        return total, [v - part for v, part in pairs]

    return dense


def replay_local_sgd(training: Training, lr: float, every: int) -> dict[str, Array]:
    """Return the weights after rounds of local SGD, of rank 0 if the last round is not complete.

    The learning rate of local steps is lr times the number of ranks.
    """
    steps, ranks = len(training.batches), training.ranks
    model = copy.deepcopy(training.model)
    trained = _trained(model)
    for begin in range(0, steps, every):
        start = [p.data.copy() for p in trained]
        whole = begin + every <= steps
        of_ranks = []
        for r in range(ranks if whole else 1):
            for p, x in zip(trained, start, strict=True):
                _set(p, x)
            sums = [p.xp.zeros_like(p.data) for p in trained]
            for step in range(begin, min(steps, begin + every)):
                gradients = training.gradients(model, step, r)
                sums = [total + g for total, g in zip(sums, gradients, strict=True)]
                for p, g in zip(trained, gradients, strict=True):
                    _set(p, p.data - lr * ranks * g)
            of_ranks.append(sums)
        if whole:
            for p, x, *parts in zip(trained, start, *of_ranks, strict=True):
                _set(p, x - lr * reduce(add, parts))
    return model.state()


def replay_quantized_gather(
    training: Training, optimizer: Callable, block: int
) -> dict[str, Array]:
    """Return the weights after some steps, each with the gradient at rounded weights.

    In the shard of each rank, `block` neighbours are whole multiples of 1/127 of the largest.
    """
    exact, coarse = copy.deepcopy(training.model), copy.deepcopy(training.model)
    rule = optimizer(exact.parameters())
    for step in range(len(training.batches)):
        for layer, rounded in zip(exact.layers, coarse.layers, strict=True):
            for first, last in pairwise(split_ends(layer.home.size, training.ranks)):
                for start in range(first, last, block):
                    w = layer.home.vector[start : min(start + block, last)]
                    level = abs(w).max() / LEVELS
                    whole = array_module(w).rint(w / level) if level > 0 else w
                    rounded.home.vector[start : start + len(w)] = whole * level + 0.0  # no -0.0
            rounded.home.changed()
        for p, *parts in zip(_trained(exact), *training.of_ranks(coarse, step), strict=True):
            p.grad = reduce(add, parts)
        rule.step()
        rule.zero_grad()
    return exact.state()


def replay_diloco(
    training: Training,
    inner: Callable[[list], optim.Optimizer],
    every: int,
    outer: tuple[float, float],
    fragments: int = 1,
    tau: int = 0,
    alpha: float = 0.0,
    bits: int | None = None,
) -> dict[str, Array]:
    """Return the common weights after DiLoCo; by default all layers meet at once, in all bits.

    outer  learning rate and momentum of the outer step
    """
    ranks, (lr, momentum) = training.ranks, outer
    alone = [copy.deepcopy(training.model) for _ in range(ranks)]
    rules = [inner(mine.parameters()) for mine in alone]
    layers = [[s.data for s in rule.slices] for rule in rules]  # of each rank
    common = [x.copy() for x in layers[0]]
    moments, means = [0 * x for x in common], [0 * x for x in common]
    homes = [rules[0].homes.index(s.home) % fragments for s in rules[0].slices]

    def outer_step(i: int) -> None:
        moments[i] = momentum * moments[i] + means[i]
        common[i] = common[i] - lr * (means[i] + momentum * moments[i])
        for of_rank in layers:
            of_rank[i][...] = alpha * of_rank[i] + (1 - alpha) * common[i]

    for t in range(1, len(training.batches) + 1):
        for r, (mine, rule) in enumerate(zip(alone, rules, strict=True)):
            training.backward(mine, t - 1, r)
            rule.step()
            rule.zero_grad()
        for i, fragment in enumerate(homes):
            first = (fragment + 1) * every // fragments
            if tau and t > first and (t - first - tau) % every == 0:
                outer_step(i)
            if (t - first) % every == 0:
                moved = [common[i] - of_rank[i] for of_rank in layers]
                means[i] = reduce(add, [_in_bits(x, bits) / ranks for x in moved])
                if not tau:
                    outer_step(i)
    for s, x in zip(rules[0].slices, common, strict=True):
        s.data[...] = x
    return alone[0].state()


def _in_bits(x: Array, bits: int | None) -> Array:
    """Return the nearest of 0 and the largest size over 1, 2, 4 ... 64, with the signs of x."""
    if bits is None or not abs(x).max():
        return x
    xp, most = array_module(x), abs(x).max()
    levels = xp.concatenate([xp.zeros(1), 0.5 ** xp.arange(6, -1, -1)]).astype(x.dtype)
    nearest = levels[(-abs(levels - (abs(x) / most)[:, None])).argmax(axis=1)]
    return xp.where(x < 0, -nearest, nearest) * most


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _set(p: nn.Parameter, value: Array) -> None:
    p.data[...] = value
    if p.home is not None:
        p.home.changed()


def _signs(v: Array) -> Array:
    return array_module(v).where(v < 0, -1.0, 1.0)


# The strategies at work.

LR = 0.1
inner = partial(optim.AdamW, lr=0.01)
OUTER = 0.7, 0.9  # learning rate and momentum


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
        replayed: Dense,
        minibatches: int | None,
        limit: bool = False,
    ):
        batches = case.minibatches(minibatches or 0)
        training = Training(case.model, batches, group.size)
        replay = partial(replay_compressed, training, replayed, momentum)
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
    return Compressed(group, case, TopK(share), dense_top_k(share), minibatches, limit=share == 1)


def sign(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send the signs, and the mean size."""
    return Compressed(group, case, Sign(), dense_sign(), minibatches)


def int8(group: Group, case: Case, minibatches: int | None = None) -> Job:
    """Send 8 bits per element, rounded at random."""
    return Compressed(group, case, Int8(case.seed), dense_int8(case.seed), minibatches)


def power_sgd(
    group: Group, case: Case, rank: int | None = None, minibatches: int | None = None
) -> Job:
    """Send matrices at this rank; by default at full rank, at which nothing is lost."""
    compress, replayed = PowerSGD(rank, case.seed), dense_power_sgd(rank, case.seed)
    return Compressed(group, case, compress, replayed, minibatches, limit=rank is None)


def quantized(group: Group, case: Case, block: int = 1, minibatches: int | None = None) -> Job:
    """Train on a stream of minibatches; take one batch's gradient where nothing is lost.

    block  elements that share a scale: one that has its own keeps its value, up to rounding
    """
    batches = case.minibatches(minibatches or (0 if block == 1 else 1))
    training = Training(case.model, batches, group.size)
    replay = partial(replay_quantized_gather, training, momentum, block)
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
        training = Training(case.model, batches, group.size)
        replay = partial(replay_diloco, training, inner, every, OUTER, **streams)
        if kind is LocalSGD:
            replay = partial(replay_local_sgd, training, LR, every)
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
