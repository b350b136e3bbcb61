"""What outlives a step: copies of weights, memories of gradients, warm starts.

Whoever keeps such a state must follow weights that are loaded or assigned, must not depend on a
loss scale that changes, must be as before after a step that is skipped or that an error ended, must
not move what a flag has frozen, and must find its way out of a gradient of zeros, of a low rank, of
inf and of NaN. What cannot follow says so. WAYS are all ways to train of the package; a test looks
for classes that keep something from step to step and are in none of them.
"""

import ast
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import minidist
from minidist import nn, optim
from minidist.autograd import Function, Tensor
from minidist.autograd.eight_bits import EightBits
from minidist.autograd.losses import scaled
from minidist.autograd.number_format import NumberFormat
from minidist.comm import Mesh
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import ServerPlan, join
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.data_parallel.streaming_diloco import StreamingDiLoCo
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.nn.parameter import COPIED, Parameter, Placement
from minidist.nn.shard import Shard
from minidist.parallel.mixed_precision import LARGEST, LossScale, MixedPrecision, overflow_allowed
from minidist.pipeline_parallel import PipeDream, Pipeline
from tests.strategies import assert_same_bits

PACKAGE = Path(minidist.__file__).parent
RANKS = 2
FLAGS: dict[str, bool] = {}  # `requires_grad` by name, set in new models by hand
sgd = partial(optim.SGD, lr=0.1, weight_decay=0.1)
COMPRESSORS = {
    "top_k": partial(TopK, 0.2),
    "sign": Sign,
    "int8": Int8,
    "power_sgd": partial(PowerSGD, 2),
}


@dataclass
class Trained:
    """A model in training, on one rank.

    step   (number of the batch, what multiplies this rank's gradient) -> None: one step, skipped if
           the sums over the ranks are not finite
    rest   () -> None: from now on all learning rates are 0
    model  what this rank has of it
    shards () -> what an optimizer updates, where these are parts of it
    drop   () -> None: what a loop of one's own does after an error; a trainer does it itself
    """

    state: Callable[[], dict]
    load: Callable[[dict], None]
    step: Callable[[int, float], None]
    rest: Callable[[], None]
    model: nn.Module
    drop: Callable[[], None] = lambda: None
    shards: Callable[[], list] = list


def flagged(model):
    for name, p in model.named_parameters().items():
        p.requires_grad = FLAGS.get(name, p.requires_grad)
    return model


def mlp():
    return flagged(nn.MLP([4, 6, 5, 3], seed=1, dtype="float32"))


def transformer():
    return flagged(nn.Transformer(7, 8, 2, 2, 4, seed=1, dtype="float32"))


def experts():
    options = {"experts": 4, "shared": 1, "capacity": None, "bias_rate": 0.125}
    return flagged(nn.Transformer(7, 8, 2, 2, 4, seed=1, dtype="float32", **options))


def batch(model, n):
    """Return the inputs and targets of batch number n, the same on every rank."""
    random = np.random.default_rng(n)
    if isinstance(model, nn.Transformer):
        return random.integers(0, 7, (2, 6, 4))
    return random.standard_normal((6, 4)).astype("float32"), random.integers(0, 3, 6)


def loss_of(model, group, n):
    """Return the loss of this rank's part of batch n, divided by the whole batch."""
    x, y = batch(model, n)
    return nn.cross_entropy(model(x[group.rank :: group.size]), y[group.rank :: group.size], len(y))


def mixed(optimizer, group, scale):
    return optimizer if scale is None else MixedPrecision(optimizer, group, scale)


def finite(model):
    return all(np.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def plainly(model, group):
    """Return (backward) -> None, which calls backward and sums the gradients over the ranks."""

    def summed(backward):
        backward()
        all_reduce_gradients(model, group)

    return summed


def in_buckets(model, group):
    reducer = Bucketed(model, group, 100)

    def summed(backward):
        with reducer.reduce():
            backward()

    summed.drop = reducer.drop
    return summed


def compressed(name, model, group):
    feedback = ErrorFeedback(model, group, COMPRESSORS[name]())

    def summed(backward):
        backward()
        feedback.all_reduce_gradients()

    return summed


def replicas(group, scale, rule=sgd, summing=plainly, frozen=()):
    model = mlp()
    if frozen:
        model.freeze(*frozen)
    optimizer = mixed(rule(model.parameters()), group, scale)
    summed = summing(model, group)

    def step(n, by=1.0):
        summed(scaled(loss_of(model, group, n), optimizer.loss_scale * by).backward)
        if scale is not None or finite(model):
            optimizer.step()
        optimizer.zero_grad()

    rest = lambda: setattr(optimizer, "lr", 0.0)  # noqa: E731
    drop = getattr(summed, "drop", model.zero_grad)
    return Trained(model.state, model.load_state, step, rest, model, drop)


def rounds(group, scale, diloco, every, model=None):
    """Local steps; the ranks do not know of each other's gradients, so none is skipped."""
    model = model or mlp()
    if diloco:
        local = DiLoCo(model, group, sgd(model.parameters()), every, momentum=0.0)
        rates = [local, local.inner]
    else:
        local = LocalSGD(model, group, 0.1, every)
        rates = [local.inside, local.outside]

    def step(n, by=1.0):
        loss_of(model, group, n).backward()
        local.step()
        local.zero_grad()

    rest = lambda: [setattr(x, "lr", 0.0) for x in rates]  # noqa: E731
    return Trained(model.state, model.load_state, step, rest, model, model.zero_grad)


def fragments(group, scale, tau):
    """Local steps, and fragments that meet in turn; what is compared are the common weights."""
    model = mlp()
    local = StreamingDiLoCo(
        model, group, sgd(model.parameters()), 2, momentum=0.0, fragments=2, tau=tau, alpha=0.5
    )

    def step(n, by=1.0):
        loss_of(model, group, n).backward()
        local.step()
        local.zero_grad()

    def rest():
        local.lr = local.inner.lr = 0.0

    return Trained(local.state, model.load_state, step, rest, model, model.zero_grad)


def sharded(group, scale, stage):
    model = mlp()
    zero = Zero(model if FLAGS else model.flatten(group.empty), group, stage)
    optimizer = mixed(sgd(zero.parameters()), group, scale)

    def step(n, by=1.0):
        zero.accumulate(scaled(loss_of(model, group, n), optimizer.loss_scale * by))
        zero.step(optimizer)

    rest = lambda: setattr(optimizer, "lr", 0.0)  # noqa: E731
    return Trained(zero.state, zero.load_state, step, rest, model, shards=zero.parameters)


def on_a_mesh(group, scale, zero, make=transformer, **axes):
    hybrid = Hybrid(make(), Mesh(group, **({"dp": 1, "pp": 1, "tp": 1} | axes)), zero=zero)
    optimizer = mixed(sgd(hybrid.parameters()), group, scale)

    def step(n, by=1.0):
        hybrid.backward(Batch(*batch(transformer(), n), loss_scale=optimizer.loss_scale * by))
        hybrid.step(optimizer)

    def rest():
        optimizer.lr = 0.0
        for balance in hybrid.pipeline.model.modules(nn.BiasBalance):
            balance.rate = 0.0

    model = hybrid.pipeline.model
    return Trained(hybrid.state, hybrid.load_state, step, rest, model, shards=hybrid.parameters)


def pipelined(group, scale):
    pipe = Pipeline(mlp(), group)
    optimizer = mixed(sgd(pipe.parameters()), group, scale)

    def step(n, by=1.0):
        pipe.backward(Batch(*batch(pipe, n), loss_scale=optimizer.loss_scale * by))
        optimizer.step()
        optimizer.zero_grad()

    rest = lambda: setattr(optimizer, "lr", 0.0)  # noqa: E731
    return Trained(pipe.state, pipe.load_state, step, rest, pipe.model)


def streamed(group, scale, scheme, copies=False):
    """PipeDream; copies: with MixedPrecision's, but without a scale: stages would share it."""
    own, alone = [], group.split(group.rank)

    def rule(parameters):
        own.append(mixed(sgd(parameters), alone, LossScale(1.0, None) if copies else None))
        return own[0]

    pipe = PipeDream(mlp(), group, rule, scheme)

    def step(n, by=1.0):
        pipe.train(Batch(*batch(pipe, n)).micro_batches(3))

    rest = lambda: setattr(own[0], "lr", 0.0)  # noqa: E731
    return Trained(pipe.state, pipe.load_state, step, rest, pipe.model)


def normed(group, scale):
    """A batch norm's running statistics, which a forward pass moves."""
    model = nn.Sequential(
        [nn.Linear(4, 3, name="in"), nn.BatchNorm(3), nn.Linear(3, 3, name="out")]
    )

    def step(n, by=1.0):
        x, y = batch(model, n)
        with np.errstate(all="ignore"):
            nn.cross_entropy(model(x * np.float32(by)), y)

    return Trained(model.state, model.load_state, step, lambda: None, model)


# Those that skip a step, alone and under a loss scale; and those that have no skipped step.
SKIPPING = {
    "naive": replicas,
    "bucketed": partial(replicas, summing=in_buckets),
    **{n: partial(replicas, summing=partial(compressed, n)) for n in COMPRESSORS},
    "top_k, frozen": partial(
        replicas, summing=partial(compressed, "top_k"), frozen=["layers.0.weight", "layers.0.bias"]
    ),
}
SCALED = SKIPPING | {
    "Adam": partial(replicas, rule=partial(optim.Adam, lr=0.01)),
    "momentum": partial(replicas, rule=partial(optim.SGD, lr=0.1, momentum=0.9)),
    "momentum, orthogonal": partial(replicas, rule=partial(optim.Muon, lr=0.01)),
    **{f"zero_{stage}": partial(sharded, stage=stage) for stage in (1, 2, 3)},
    **{f"hybrid, zero {z}": partial(on_a_mesh, zero=z, dp=RANKS) for z in (0, 1, 2, 3)},
    "hybrid, biases of routers": partial(on_a_mesh, zero=0, make=experts, dp=RANKS),
    "hybrid, tp": partial(on_a_mesh, zero=0, tp=RANKS),
    "hybrid, pp": partial(on_a_mesh, zero=0, pp=RANKS),
    "pipeline": pipelined,
}
OTHERS = {
    **{f"local SGD {every}": partial(rounds, diloco=False, every=every) for every in (1, 3)},
    **{f"DiLoCo {every}": partial(rounds, diloco=True, every=every) for every in (1, 3)},
    **{f"streaming DiLoCo {tau}": partial(fragments, tau=tau) for tau in (0, 1)},
    **{s: partial(streamed, scheme=s) for s in ("weight_stashing", "vertical_sync", "2bw")},
    "weight_stashing, copies": partial(streamed, scheme="weight_stashing", copies=True),
    "2bw, copies": partial(streamed, scheme="2bw", copies=True),
}
# {name: (make, LossScale's arguments or None)}
WAYS = {name: (make, None) for name, make in (SCALED | OTHERS).items()}
WAYS |= {f"{name}, scaled": (make, (4.0, None)) for name, make in SCALED.items()}


def begin(name, group):
    make, scale = WAYS[name]
    return make(group, None if scale is None else LossScale(*scale))


def other_weights(state):
    """Return other weights of these names and shapes, the same on every rank."""
    random = np.random.default_rng(9)
    return {n: random.standard_normal(w.shape).astype(w.dtype) / 2 for n, w in state.items()}


@pytest.mark.parametrize("name", WAYS)
def test_steps_of_rate_0_leave_the_weights_that_were_loaded(cluster, name):
    def worker(group):
        trained = begin(name, group)
        for n in range(2):
            trained.step(n)
        new = other_weights(trained.state())
        trained.load(new)
        loaded = trained.state()
        trained.rest()
        for n in range(4):
            trained.step(n)
        return trained.state(), loaded, new

    for state, loaded, new in cluster(RANKS, "thread").run(worker):
        assert_same_bits(loaded, new)
        assert_same_bits(state, new)


def give(trained, new):
    """Give this rank's parameters other arrays, by hand; assigned, they would be in no vector."""
    for name, p in trained.model.named_parameters().items():
        array = new[name] if p.shard is None else p.shard.of(new[name])
        assert p.home is None or refusal(setattr, p, "data", array.copy())
        p.load(array)


def refusal(f, *args):
    """Return the words of a ValueError, or None."""
    try:
        f(*args)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", WAYS)
def test_weights_that_are_given_by_hand_are_those_that_are_loaded(cluster, name):
    def worker(group):
        ends = []
        for by_hand in (False, True):
            trained = begin(name, group)
            trained.step(0)
            new = other_weights(trained.state())
            if not by_hand:
                trained.load(new)
            elif words := refusal(give, trained, new):
                return words
            for n in range(3):
                trained.step(n)
            ends.append(trained.state())
        return ends

    for found in cluster(RANKS, "thread").run(worker):
        if "zero 3" in name or "zero_3" in name:
            assert "cannot be loaded here: each rank keeps its shard" in found
        else:
            assert_same_bits(*found)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_flag_has_frozen_does_not_move(cluster, monkeypatch, name, when):
    """Where it is too late to leave it out, the next step is refused."""

    def worker(group):
        trained = begin(name, group)
        start = trained.state()
        if when == "after":
            first = next(p for p in trained.model.parameters() if p.requires_grad)
            first.requires_grad = False
            return refusal(trained.step, 0)
        for n in range(3):
            trained.step(n)
        return {name: w for name, w in trained.state().items() if name in FLAGS}, start

    for frozen in ("layers.0.weight", "embedding.token.weight") if when == "before" else ():
        monkeypatch.setitem(FLAGS, frozen, False)
    for found in cluster(RANKS, "thread").run(worker):
        if when == "after":
            assert "or no longer trained there" in found
        else:
            end, start = found
            assert len(end) == 1
            assert_same_bits(end, {name: start[name] for name in end})


STAGES = ("hybrid, pp", "pipeline", "weight_stashing", "vertical_sync", "2bw")


class Boom(Function):
    def forward(self, x):
        return x

    def backward(self, grad):
        raise ZeroDivisionError("on purpose")


def break_off(trained, n, calls):
    """Take a step that an error ends on every rank.

    calls  0: in backward, before the second product; or the call of forward that it happens in
    """
    layer = list(trained.model.modules(nn.Linear | nn.LayerNorm))[-1 if calls else 1]
    forward, numbers = layer.forward, itertools.count(1)

    def breaking(x, *rest):
        if next(numbers) == calls:
            raise ZeroDivisionError("on purpose")
        y = forward(x, *rest)
        return y if calls else Boom()(y)

    layer.forward = breaking
    with pytest.raises(ZeroDivisionError):
        trained.step(n)
    layer.forward = forward
    trained.drop()


@pytest.mark.parametrize("name", [name for name in WAYS if "scaled" not in name])
def test_a_batch_that_an_error_ended_leaves_no_trace(cluster, name):
    """Or the next one is refused: stages have sent what nobody has received."""

    def worker(group):
        ends = []
        for broken in (False, True):
            trained = begin(name, group)
            calls = group.size - group.rank if name.startswith(STAGES) else 0
            trained.step(0)
            for load in (False, True):
                if broken:
                    break_off(trained, 9, calls)
                if load:
                    trained.load(other_weights(trained.state()))
                if words := refusal(trained.step, 1):
                    return words
            trained.step(2)
            ends.append(trained.state())
        return ends

    for found in cluster(RANKS, "thread").run(worker):
        if isinstance(found, str):
            assert "an error ended an earlier batch" in found
            assert name.startswith(STAGES)
        else:
            assert_same_bits(*found)


@pytest.mark.parametrize("name", ["zero_3", "hybrid, zero 3"])
def test_what_was_gathered_early_is_gathered_again_if_a_shard_has_changed(cluster, name):
    """The batch breaks off while the first layer's weights are on their way for its backward."""

    def worker(group):
        ends = []
        for early in (True, False):
            trained = begin(name, group)
            if early:
                break_off(trained, 9, 0)
            for p in trained.shards():
                p.load(2 * p.data)
            trained.step(0)
            ends.append(trained.state())
        return ends

    for found in cluster(RANKS, "thread").run(worker):
        assert_same_bits(*found)


def copied_state(model):
    return copy.deepcopy(model).state()


@pytest.mark.parametrize("name", [name for name in WAYS if "scaled" not in name])
def test_a_copied_model_has_the_weights_and_leaves_the_original_alone(cluster, name):
    """Or an error says who has them."""

    def worker(group):
        ends, words = [], None
        for copying in (False, True):
            trained = begin(name, group)
            trained.step(0)
            if copying and not (words := refusal(copied_state, trained.model)):
                copied = copy.deepcopy(trained.model)
                assert_same_bits(copied.state(), trained.model.state())
                for p in copied.parameters():
                    p.load(0 * p.data)
            trained.step(1)
            ends.append(trained.state())
        return words, ends

    for words, ends in cluster(RANKS, "thread").run(worker):
        if name in ("zero_2", "zero_3", "hybrid, zero 3"):
            assert "state()" in words
        else:
            assert words is None
        assert_same_bits(*ends)


def test_what_is_copied_together_goes_on_as_the_originals(cluster):
    """Also if the weights have just been loaded, and nobody has followed yet."""

    def worker(group):
        model = mlp().astype("float16")
        optimizer = mixed(optim.Adam(model.parameters(), 0.01), group, LossScale(8.0, None))
        sums, ends = ErrorFeedback(model, group, TopK(0.2)), []

        def steps(model, optimizer, sums, numbers):
            for n in numbers:
                x, y = batch(model, n)
                loss = nn.cross_entropy(model(x[:3].astype("float16")), y[:3], len(y))
                scaled(loss, optimizer.loss_scale).backward()
                sums.all_reduce_gradients()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(model.state())

        for load in (False, True):
            steps(model, optimizer, sums, range(3))
            if load:
                model.load_state(other_weights(model.state()))
            for them in copy.deepcopy((model, optimizer, sums)), (model, optimizer, sums):
                steps(*them, range(3, 6))
        return ends

    for ends in cluster(RANKS, "thread").run(worker):
        assert_same_bits(*ends[1:3])
        assert_same_bits(*ends[4:6])


def test_copies_pickles_and_parts_keep_what_a_parameter_keeps():
    kept = {
        "requires_grad": False,
        "format": NumberFormat(EightBits(2), np.dtype("float64"), keeps_dtype=True),
        "name": "another",
    }
    place = Placement("a part", (), "two ranks", "there")
    p = nn.Linear(4, 3, name="in").weight
    vars(p).update(kept, placement=place)
    of_this_run = {"home", "_data", "_grad", "grad", "grad_buffer", "summed_over", "keeper"}
    named = {*Parameter.__annotations__, *Tensor.__annotations__, *vars(p)}
    assert {*COPIED, *of_this_run, "creator", "hooks"} == named - {"data", "ops"}  # of the class
    for copied in copy.deepcopy(p), pickle.loads(pickle.dumps(p)):
        assert vars(copied).items() >= (kept | {"placement": place}).items()
    assert vars(p.part(Shard(0, np.arange(2), 4))).items() >= kept.items()


GRID = pytest.mark.slow, pytest.mark.grid(12)
WITHOUT_MOMENTS = [name for name in WAYS if not name.startswith(("Adam", "momentum"))]


@pytest.mark.parametrize("name", WITHOUT_MOMENTS)
@pytest.mark.parametrize("before", [1, pytest.param(3, marks=GRID)])
def test_who_has_loaded_weights_goes_on_as_if_it_began_with_them(cluster, name, before):
    """But for the moments of an optimizer, which load_state keeps."""

    def worker(group):
        ends = []
        for steps in (before, 0):
            trained = begin(name, group)
            for n in range(steps):
                trained.step(n)
            trained.load(other_weights(trained.state()))
            for n in range(6):
                trained.step(n)
            ends.append(trained.state())
        return ends

    for after, alone in cluster(RANKS, "thread").run(worker):
        assert_same_bits(after, alone)


@pytest.mark.parametrize("name", [*SKIPPING, *(f"{name}, scaled" for name in SCALED)])
@pytest.mark.parametrize("bad", [np.inf, pytest.param(np.nan, marks=GRID)])
def test_a_step_that_is_skipped_leaves_no_trace(cluster, name, bad):
    """One rank's gradient is bad, in the first step and in a later one."""

    def worker(group):
        ends = []
        for by in (bad, None):
            trained = begin(name, group)
            with overflow_allowed():
                for n in range(5):
                    if n in (0, 3) and by is not None:
                        trained.step(9, by if group.rank == 1 else 1.0)
                    trained.step(n)
            ends.append(trained.state())
        return ends

    for disturbed, right in cluster(RANKS, "thread").run(worker):
        assert all(np.isfinite(w).all() for w in right.values())
        assert_same_bits(disturbed, right)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(
    "scale",
    [(2.0**10, 1), *(pytest.param(s, marks=GRID) for s in [(1.0, None), (4.0, 2)])],
)
def test_the_loss_scale_and_its_changes_are_in_no_weight(cluster, name, scale):
    def worker(group):
        ends = []
        for arguments in (scale, (16.0, None)):
            trained = SCALED[name](group, LossScale(*arguments))
            for n in range(5):
                trained.step(n)
            ends.append(trained.state())
        return ends

    for scaled_, right in cluster(RANKS, "thread").run(worker):
        assert_same_bits(scaled_, right)


def overflow_elsewhere(group, name, skipped):
    """Two stages of two replicas each; in one step, if at all, a gradient of stage 1 is inf."""
    stages = Mesh(group, pp=2, dp=2)
    model, random = mlp(), np.random.default_rng(group.rank)
    sums = ErrorFeedback(model, stages.dp, COMPRESSORS[name]())
    optimizer = MixedPrecision(sgd(model.parameters()), group, LossScale(4.0, None))
    for n in range(4):
        for bad in [True] * (skipped and n == 2) + [False]:
            random = np.random.default_rng([group.rank, n, bad])
            for p in model.parameters():
                p.grad = random.standard_normal(p.shape).astype("float32")
            if bad and stages.pp.rank == 1:
                p.grad[...] = np.inf
            with overflow_allowed():
                sums.all_reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
    return model.state() | sums.errors, sums.steps


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_step_that_ranks_elsewhere_skip_leaves_no_trace_either(cluster, name):
    skipped, right = (cluster(4, "thread").run(overflow_elsewhere, name, s) for s in (True, False))
    for (mine, steps), (want, all_steps) in zip(skipped, right, strict=True):
        assert steps == all_steps == 4
        assert_same_bits(mine, want)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_plain_optimizer_after_a_scaled_one_has_no_scale(cluster, name):
    def worker(group, scale):
        model = mlp()
        sums = ErrorFeedback(model, group, COMPRESSORS[name]())
        optimizer = mixed(sgd(model.parameters()), group, LossScale(scale, None))
        for n in range(6):
            optimizer = sgd(model.parameters()) if n == 3 else optimizer
            scaled(loss_of(model, group, n), optimizer.loss_scale).backward()
            sums.all_reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
        return model.state()

    for one, thousand in zip(
        *(cluster(RANKS, "thread").run(worker, scale) for scale in (1.0, 1024.0)), strict=True
    ):
        assert_same_bits(thousand, one)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_owed_to_loaded_weights_is_what_is_owed_to_the_same_weights(cluster, name):
    """Steps before they are loaded are forgotten, once, though the last of them was skipped."""

    def worker(group):
        ends = []
        for before in (2, 0):
            model, scale = mlp(), LossScale(1.0, None)
            MixedPrecision(sgd(model.parameters()), group, scale)
            if not before:
                model.load_state(other_weights(model.state()))
            sums = ErrorFeedback(model, group, COMPRESSORS[name]())
            for n in [*range(before), *range(4)]:
                if n == 0 and sums.steps:
                    scale.update(overflow=True)
                    model.load_state(other_weights(model.state()))
                loss_of(model, group, n).backward()
                sums.all_reduce_gradients()
                model.zero_grad()
            ends.append((sums.steps, sums.errors))
        return ends

    for (steps, errors), (right, want) in cluster(RANKS, "thread").run(worker):
        assert steps == right == 4
        assert_same_bits(errors, want)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_that_load_different_weights_are_refused(cluster, name):
    def worker(group):
        model = mlp()
        sums = ErrorFeedback(model, group, COMPRESSORS[name]())
        model.load_state({k: w + group.rank for k, w in model.state().items()})
        loss_of(model, group, 0).backward()
        sums.all_reduce_gradients()

    with pytest.raises(RankFailed, match="parameters differ between ranks"):
        cluster(RANKS, "thread").run(worker)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("first, then", [(True, False), (True, True), (False, True)])
def test_a_step_is_taken_back_where_its_own_optimizer_skipped_it(cluster, name, first, then):
    """Another optimizer takes over; it has a scale that has skipped 7 steps, or none."""

    def worker(group):
        model, scales = mlp(), [LossScale(4.0, None) if has else None for has in (first, then)]
        sums = ErrorFeedback(model, group, COMPRESSORS[name]())
        mixed(sgd(model.parameters()), group, scales[0])
        for n in range(2):
            before = dict(sums.errors)
            loss_of(model, group, n).backward()
            sums.all_reduce_gradients()
            model.zero_grad()
        if first:
            scales[0].update(overflow=True)
        if then:
            scales[1].state = {"value": 4.0, "good": 0, "skipped": 7}
        mixed(sgd(model.parameters()), group, scales[1])
        errors = dict(sums.errors) if group.rank == 0 else None  # either may come first
        return sums.steps, errors or sums.errors, before, sums.memory.before

    for steps, errors, before, kept in cluster(RANKS, "thread").run(worker):
        assert steps == 2 - first and kept is None
        if first:
            assert_same_bits(errors, before)


@pytest.mark.parametrize("diloco", [False, True])
def test_a_model_from_a_process_with_a_later_clock_is_not_one_that_just_changed(cluster, diloco):
    """If it were, a round would begin in every step, and never end."""
    model = mlp()
    for layer in model.layers:
        layer.flat.changed(at=10**12)
    sent = pickle.dumps(model)

    def worker(group, sent):
        trained = rounds(group, None, diloco, every=2, model=pickle.loads(sent))
        for n in range(2):
            trained.step(n)
        return trained.state()

    first, second = cluster(RANKS, "thread").run(worker, sent)
    assert_same_bits(first, second)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("first", ["zeros", "rank 1", "tiny", "huge", "inf", "nan", "one column"])
@pytest.mark.parametrize("dtype", ["float64", "float16", pytest.param("float32", marks=GRID)])
def test_a_memory_finds_its_way_out_of_any_gradient(cluster, name, first, dtype):
    """After one such gradient and many of another kind, what is owed does not grow."""
    G = np.random.default_rng(0).standard_normal((5, 4))
    begins = {
        "zeros": 0 * G,
        "rank 1": np.outer(G[:, 0], G[0]),
        "tiny": 1e-7 * G,
        "huge": 1e4 * G,
        "inf": np.where(G == G.max(), np.inf, G),
        "nan": np.where(G == G.max(), np.nan, G),
        "one column": np.where(np.arange(4) == 1, G, 0),
    }

    def worker(group):
        p = nn.Sequential([nn.Linear(5, 4, bias=False, dtype=dtype)])
        (weight,), sums = p.parameters(), ErrorFeedback(p, group, COMPRESSORS[name]())
        found = []
        with overflow_allowed():
            for n in range(81):
                weight.grad = (G if n else begins[first]).astype(dtype) / group.size
                sums.all_reduce_gradients()
                weight.grad = None
                found.append(abs(sums.errors.get(weight.name, np.zeros(1))).max())
        return found[40], found[-1]

    for half_way, end in cluster(RANKS, "thread").run(worker):
        limit = 10 * abs(G).max() + (1e4 * abs(G).max() if first == "huge" else 0)
        assert end <= limit and end <= 2 * half_way + 1e-2


@pytest.mark.parametrize("by", [np.inf, np.nan, 1e30, 0.0])
def test_running_statistics_find_their_way_out_of_any_batch(by):
    trained, right = normed(None, None), normed(None, None)
    for n in range(3):
        trained.step(9, by)
        trained.step(n)
        right.step(n)
        if by == 0:  # a batch of zeros is a batch
            right.step(9, by)
    running = [{k: v for k, v in t.state().items() if "running" in k} for t in (trained, right)]
    assert all(np.isfinite(v).all() for v in running[0].values())
    if by != 0:
        assert_same_bits(*running)


def test_a_channel_that_is_not_finite_stops_no_other_channel():
    norms = [nn.BatchNorm(2), nn.BatchNorm(2)]
    x = np.random.default_rng(0).standard_normal((6, 2)).astype("float32")
    with np.errstate(all="ignore"):
        for norm, bad in zip(norms, (0.0, np.inf), strict=True):
            norm(x + np.float32([0, bad]))
    (mean, var), (right_mean, right_var) = (
        (norm.running_mean.data, norm.running_var.data) for norm in norms[::-1]
    )
    assert (mean[0], var[0]) == (right_mean[0], right_var[0]) and mean[0] != 0
    assert (mean[1], var[1]) == (0, 1)


def test_a_loss_scale_stays_a_number_where_all_gradients_are_0():
    scale = LossScale(2.0**120, every=1)
    for _ in range(10):
        scale.update(overflow=False)
    assert scale.value == LARGEST == 2.0**127
    scale.update(overflow=True)
    assert scale.value == 2.0**126


@pytest.mark.parametrize("value", [True, 3, 0, -2, 2.0**128, np.inf, np.nan, "2", None])
def test_a_loss_scale_is_a_power_of_two_of_float32(value):
    with pytest.raises(ValueError, match="a loss scale is a power of two up to"):
        LossScale(value)
    with pytest.raises(ValueError, match="a loss scale is a power of two up to"):
        LossScale().state = {"value": value, "good": 0, "skipped": 0}


@pytest.mark.parametrize("every", [1.5, np.nan, 0, "2"])
def test_a_loss_scale_is_doubled_after_a_whole_number_of_steps(every):
    with pytest.raises(ValueError, match="1 good step or more"):
        LossScale(every=every)


@pytest.mark.parametrize("diloco", [False, True])
def test_ranks_that_change_their_weights_apart_within_a_round_are_refused(cluster, diloco):
    def worker(group):
        trained = rounds(group, None, diloco, every=3)
        trained.step(0)
        trained.load({name: 2 * w for name, w in trained.state().items()})
        trained.step(1)

    with pytest.raises(RankFailed, match="parameters differ between ranks"):
        cluster(RANKS, "thread").run(worker)


def test_diloco_has_no_float32_copies_inside(cluster):
    def worker(group):
        model = mlp()
        DiLoCo(model, group, MixedPrecision(sgd(model.parameters()), group), 2)

    with pytest.raises(RankFailed, match="without MixedPrecision"):
        cluster(RANKS, "thread").run(worker)


def test_servers_keep_the_weights_so_that_none_can_be_loaded(cluster):
    def worker(group):
        model = mlp()
        join(group, model, sgd, ServerPlan())
        model.load_state(mlp().state())

    with pytest.raises(RankFailed, match="servers keep it"):
        cluster(RANKS, "thread").run(worker)


# Classes that keep something from step to step: where it is shown here, or why it need not be.
KEPT = {
    "data_parallel/compression.py:Memory": "top_k, sign, int8, power_sgd",
    "data_parallel/power_sgd.py:PowerSGD": "power_sgd",
    "data_parallel/local_sgd.py:LocalSGD": "local SGD 3",
    "data_parallel/local_sgd.py:DiLoCo": "DiLoCo 3",
    "data_parallel/streaming_diloco.py:StreamingDiLoCo": "streaming DiLoCo 0, 1",
    "data_parallel/bucketed.py:Bucketed": "gradients that a step replaces, dropped at its end",
    "data_parallel/parameter_server.py:Worker": "weights cannot be loaded, nor scaled",
    "parallel/mixed_precision.py:MixedPrecision": "all that are scaled",
    "parallel/mixed_precision.py:LossScale": "all that are scaled",
    "nn/optim/optimizer.py:Optimizer": "Adam, momentum",
    "nn/flat_parameters.py:FlatParameters": "the weights and gradients themselves",
    "parallel/trainer.py:Trainer": "has the weights themselves",
    "pipeline_parallel/reduction.py:OverlappedSums": "gradients of a batch, dropped at its end",
    "pipeline_parallel/weight_stashing.py:PipeDream": "weight_stashing, vertical_sync, 2bw",
    "pipeline_parallel/weight_stashing.py:WeightVersions": "weight_stashing, vertical_sync, 2bw",
    "pipeline_parallel/stage.py:Stage": "begins anew with every batch",
    "nn/module.py:Module": "has the weights themselves",
    "nn/key_value_cache.py:KeyValueCache": "of a text that is read, not trained on",
    "checkpoint/run_checkpoints.py:Background": "a copy of what is written",
}
NOT_TRAINING = "autograd comm course mistakes pages planning verify observe bench cli".split()
COPYING = {"copy", "deepcopy", "astype", "zeros_like", "empty_like"}


def copies(value: ast.expr) -> bool:
    """Return whether an expression makes an array from another one."""
    calls = [n.func for n in ast.walk(value) if isinstance(n, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
    products = [n for n in ast.walk(value) if isinstance(n, ast.BinOp)]
    zeros = any(isinstance(n.left, ast.Constant) and n.left.value == 0 for n in products)
    return zeros or bool(names & COPYING)


def keeps(cls: ast.ClassDef) -> bool:
    """Return whether objects keep copies of arrays, or have a state to save."""
    for method in (m for m in cls.body if isinstance(m, ast.FunctionDef)):
        if method.name in ("state", "load_state"):
            return True
        for n in ast.walk(method):
            if isinstance(n, ast.Assign | ast.AnnAssign):
                targets = n.targets if isinstance(n, ast.Assign) else [n.target]
                own = any("self." in ast.unparse(t).split("[")[0] for t in targets)
                typed = isinstance(n, ast.AnnAssign) and "Array" in ast.unparse(n.annotation)
                if own and (typed or (n.value is not None and copies(n.value))):
                    return True
    return False


def classes_that_keep() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] not in NOT_TRAINING:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and keeps(node):
                    yield f"{inside.as_posix()}:{node.name}"


def test_no_class_that_keeps_something_from_step_to_step_is_missing_here():
    assert set(classes_that_keep()) == set(KEPT)
