"""What outlives a step: copies of weights, memories of gradients, warm starts.

Whoever keeps such a state must follow weights that are loaded or assigned, must not depend on a
loss scale that changes, must be as before after a step that is skipped or that an error ended, must
not move what a flag has frozen, and must find its way out of a gradient of zeros, of a low rank, of
inf and of NaN. What cannot follow says so. WAYS are all ways to train of the package; a few of them
are tried every day, all by the grids.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from minidist import nn, optim
from minidist.autograd import Function
from minidist.autograd.losses import scaled
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
from minidist.parallel.mixed_precision import LARGEST, LossScale, MixedPrecision, overflow_allowed
from minidist.pipeline_parallel import PipeDream, Pipeline
from tests.strategies import assert_same_bits

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
    model  what this rank has of it
    shards () -> what an optimizer updates, where these are parts of it
    drop   () -> None: what a loop of one's own does after an error; a trainer does it itself
    """

    state: Callable[[], dict]
    load: Callable[[dict], None]
    step: Callable[[int, float], None]
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

    drop = getattr(summed, "drop", model.zero_grad)
    return Trained(model.state, model.load_state, step, model, drop)


def rounds(group, scale, diloco, every, model=None):
    """Local steps; the ranks do not know of each other's gradients, so none is skipped."""
    model = model or mlp()
    if diloco:
        local = DiLoCo(model, group, sgd(model.parameters()), every, momentum=0.0)
    else:
        local = LocalSGD(model, group, 0.1, every)

    def step(n, by=1.0):
        loss_of(model, group, n).backward()
        local.step()
        local.zero_grad()

    return Trained(model.state, model.load_state, step, model, model.zero_grad)


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

    return Trained(local.state, model.load_state, step, model, model.zero_grad)


def zero_of(group, stage):
    model = mlp()
    return Zero(model if FLAGS else model.flatten(group.empty), group, stage)


def on_a_mesh(group, zero, make=transformer, **axes):
    return Hybrid(make(), Mesh(group, **({"dp": 1, "pp": 1, "tp": 1} | axes)), zero=zero)


def by_trainer(build, **options):
    """Return (group, scale) -> Trained, by a trainer of the package: build(group, **options)."""

    def begun(group, scale):
        trainer = build(group, **options)
        model = trainer.pipeline.model if isinstance(trainer, Hybrid) else trainer.model
        optimizer = mixed(sgd(trainer.parameters()), group, scale)

        def step(n, by=1.0):
            data = batch(transformer() if isinstance(trainer, Hybrid) else model, n)
            trainer.backward(Batch(*data, loss_scale=optimizer.loss_scale * by))
            trainer.step(optimizer)

        return Trained(trainer.state, trainer.load_state, step, model, shards=trainer.parameters)

    return begun


def streamed(group, scale, scheme, copies=False):
    """PipeDream; copies: with MixedPrecision's, but without a scale: stages would share it."""
    alone = group.split(group.rank)
    own = LossScale(1.0, None) if copies else None
    pipe = PipeDream(mlp(), group, lambda parameters: mixed(sgd(parameters), alone, own), scheme)

    def step(n, by=1.0):
        pipe.train(Batch(*batch(pipe, n)).micro_batches(3))

    return Trained(pipe.state, pipe.load_state, step, pipe.model)


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
    **{f"zero_{stage}": by_trainer(zero_of, stage=stage) for stage in (1, 2, 3)},
    **{f"hybrid, zero {z}": by_trainer(on_a_mesh, zero=z, dp=RANKS) for z in (0, 1, 2, 3)},
    "hybrid, biases of routers": by_trainer(on_a_mesh, zero=0, make=experts, dp=RANKS),
    "hybrid, tp": by_trainer(on_a_mesh, zero=0, tp=RANKS),
    "hybrid, pp": by_trainer(on_a_mesh, zero=0, pp=RANKS),
    "pipeline": by_trainer(lambda group: Pipeline(mlp(), group)),
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


GRID = pytest.mark.slow, pytest.mark.grid(12)


def ways(names, few):
    """Try a few of these ways every day, some of the others where grids run."""
    every = [name if name in few else pytest.param(name, marks=GRID) for name in names]
    assert set(few) <= set(names)
    return pytest.mark.parametrize("name", every)


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


WITHOUT_MOMENTS = [name for name in WAYS if not name.startswith(("Adam", "momentum"))]


@ways(
    WITHOUT_MOMENTS,
    ["top_k, scaled", "zero_3", "hybrid, biases of routers", "DiLoCo 3", "2bw, copies"],
)
def test_who_has_got_other_weights_goes_on_as_if_it_began_with_them(cluster, name):
    """Loaded or given by hand; but for the moments of an optimizer, which load_state keeps."""

    def worker(group):
        ends, words = [], None
        for before, by_hand in ((0, False), (1, False), (1, True)):
            trained = begin(name, group)
            for n in range(before):
                trained.step(n)
            new = other_weights(trained.state())
            if by_hand and (words := refusal(give, trained, new)):
                break
            if not by_hand:
                trained.load(new)
            assert_same_bits(trained.state(), new)
            for n in range(6):
                trained.step(n)
            ends.append(trained.state())
        return ends, words

    for (began, *others), words in cluster(RANKS, "thread").run(worker):
        if "zero 3" in name or "zero_3" in name:
            assert "cannot be loaded here: each rank keeps its shard" in words
        assert len(others) == (2 if words is None else 1)
        for state in others:
            assert_same_bits(state, began)


@ways(WAYS, ["bucketed", "zero_2", "hybrid, tp", "2bw"])
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


UNSCALED = [name for name in WAYS if "scaled" not in name]


@ways(UNSCALED, ["power_sgd", "zero_3", "hybrid, pp", "local SGD 3"])
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


@ways(UNSCALED, ["naive", "zero_2", "hybrid, zero 3", "2bw"])
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


@ways(
    [*SKIPPING, *(f"{name}, scaled" for name in SCALED)],
    ["sign", "power_sgd, scaled", "zero_1, scaled", "hybrid, biases of routers, scaled"],
)
def test_a_step_that_is_skipped_leaves_no_trace(cluster, name):
    """One rank's gradient is inf in the first step, and NaN in a later one."""

    def worker(group):
        ends = []
        for bad in ({0: np.inf, 3: np.nan}, {}):
            trained = begin(name, group)
            with overflow_allowed():
                for n in range(5):
                    if n in bad:
                        trained.step(9, bad[n] if group.rank == 1 else 1.0)
                    trained.step(n)
            ends.append(trained.state())
        return ends

    for disturbed, right in cluster(RANKS, "thread").run(worker):
        assert all(np.isfinite(w).all() for w in right.values())
        assert_same_bits(disturbed, right)


@ways(SCALED, ["int8", "Adam", "zero_3", "hybrid, pp"])
def test_the_loss_scale_and_its_changes_are_in_no_weight(cluster, name):
    def worker(group):
        ends = []
        for arguments in ((2.0**10, 1), (4.0, 2), (16.0, None)):
            trained = SCALED[name](group, LossScale(*arguments))
            for n in range(5):
                trained.step(n)
            ends.append(trained.state())
        return ends

    for *changing, right in cluster(RANKS, "thread").run(worker):
        for state in changing:
            assert_same_bits(state, right)


def overflow_elsewhere(group, name, skipped):
    """Two stages of two replicas each; in one step, if at all, a gradient of stage 1 is inf."""
    stages = Mesh(group, pp=2, dp=2)
    model = mlp()
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


@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
def test_a_step_that_ranks_elsewhere_skip_leaves_no_trace_either(cluster, name):
    skipped, right = (cluster(4, "thread").run(overflow_elsewhere, name, s) for s in (True, False))
    for (mine, steps), (want, all_steps) in zip(skipped, right, strict=True):
        assert steps == all_steps == 4
        assert_same_bits(mine, want)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_memory_finds_its_way_out_of_any_gradient(cluster, name):
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

    def worker(group, first):
        p = nn.Sequential([nn.Linear(5, 4, bias=False, dtype="float16")])
        (weight,), sums = p.parameters(), ErrorFeedback(p, group, COMPRESSORS[name]())
        found = []
        with overflow_allowed():
            for n in range(41):
                weight.grad = (G if n else first).astype("float16") / group.size
                sums.all_reduce_gradients()
                weight.grad = None
                found.append(abs(sums.errors.get(weight.name, np.zeros(1))).max())
        return found[20], found[-1]

    for kind, first in begins.items():
        for half_way, end in cluster(RANKS, "thread").run(worker, first):
            limit = 10 * abs(G).max() + (1e4 * abs(G).max() if kind == "huge" else 0)
            assert end <= limit and end <= 2 * half_way + 1e-2, kind


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e30])
def test_running_statistics_find_their_way_out_of_any_batch(bad):
    """A channel that is not finite is left out of them, and stops no other channel."""
    norms = [nn.BatchNorm(2), nn.BatchNorm(2)]
    x = np.random.default_rng(0).standard_normal((6, 2)).astype("float32")
    with np.errstate(all="ignore"):
        for norm, factor in zip(norms, (1, bad), strict=True):
            norm(x)
            norm(x * np.float32([1, factor]))
    states = [np.array([norm.running_mean.data, norm.running_var.data]) for norm in norms]
    right, found = states
    np.testing.assert_array_equal(found[:, 0], right[:, 0])
    assert np.isfinite(found).all()


def test_a_loss_scale_stays_a_number_where_all_gradients_are_0():
    scale = LossScale(2.0**120, every=1)
    for _ in range(10):
        scale.update(overflow=False)
    assert scale.value == LARGEST == 2.0**127
    scale.update(overflow=True)
    assert scale.value == 2.0**126


def test_what_is_no_loss_scale_is_refused():
    for value in (True, 3, 0, -2, 2.0**128, np.inf, np.nan, "2", None):
        with pytest.raises(ValueError, match="a loss scale is a power of two up to"):
            LossScale(value)
        with pytest.raises(ValueError, match="a loss scale is a power of two up to"):
            LossScale().state = {"value": value, "good": 0, "skipped": 0}
    for every in (1.5, np.nan, 0, "2"):
        with pytest.raises(ValueError, match="1 good step or more"):
            LossScale(every=every)


def compresses_what_differs(group):
    model = mlp()
    sums = ErrorFeedback(model, group, TopK(0.2))
    model.load_state({k: w + group.rank for k, w in model.state().items()})
    loss_of(model, group, 0).backward()
    sums.all_reduce_gradients()


def moves_apart(group, diloco):
    trained = rounds(group, None, diloco, every=3)
    trained.step(0)
    trained.load({name: 2 * w for name, w in trained.state().items()})
    trained.step(1)


def copies_inside(group):
    model = mlp()
    DiLoCo(model, group, MixedPrecision(sgd(model.parameters()), group), 2)


def loads_what_is_served(group):
    model = mlp()
    join(group, model, sgd, ServerPlan())
    model.load_state(mlp().state())


@pytest.mark.parametrize(
    "worker, message",
    [
        (compresses_what_differs, "parameters differ between ranks"),
        (partial(moves_apart, diloco=False), "parameters differ between ranks"),
        (partial(moves_apart, diloco=True), "parameters differ between ranks"),
        (copies_inside, "without MixedPrecision"),
        (loads_what_is_served, "servers keep it"),
    ],
)
def test_what_cannot_follow_is_refused(cluster, worker, message):
    with pytest.raises(RankFailed, match=message):
        cluster(RANKS, "thread").run(worker)
