"""ZeRO's three stages train as one device does, whatever is cut, and whoever owns nothing."""

import gc
import multiprocessing
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest

from minidist import Cluster, Tensor, nn, no_grad, optim
from minidist.backend import on_gpu, to_device
from minidist.data_parallel.zero import Zero
from minidist.errors import RankDied, RankFailed
from minidist.nn.datasets import shard
from minidist.planning.costs.zero import zero_bytes_held
from minidist.verify.compare import compare
from tests import causes
from tests.data_parallel.zero_training import train
from tests.strategies import arrays

STAGES = [1, 2, 3]
each_stage = pytest.mark.parametrize("stage", STAGES)


def tokens(examples=13, vocab=7, context=4, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (2, examples, context))


def trained(ranks, stage, model, data=None, **more):
    """Return [(weights, bytes of optimizer state) per rank] after some steps, tokens or `data`."""
    return ranks.run(partial(train, **more), stage, model, *(data or tokens()))


def transformer(tied=False, dropout=0.2):
    return nn.Transformer(7, 6, 2, 2, 4, dtype="float64", dropout=dropout, tied=tied)


def one_layer_unused():
    class Partial(nn.Sequential):
        def forward(self, x, randomness=None):
            embedding, first, _, head = self.layers
            return head(first(embedding(x, randomness), randomness))

    return Partial(transformer().layers)


def one_parameter_unused():
    """Layer 1 never has all its gradients: some of its elements are zero instead."""
    model = transformer()
    model.layers[1].extra = nn.Parameter(arrays(3, 3), "blocks.0.extra")
    return model.flatten()


@each_stage
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_norm_that_clips_is_one_devices_on_every_rank(cluster, stage, size):
    def worker(group, stage):
        model = nn.MLP([4, 5, 3], "gelu", dtype="float64").flatten(group.empty)
        zero = Zero(model, group, stage)
        mine = shard(np.arange(6), group.rank, group.size)
        loss = nn.cross_entropy(model(arrays(6, 4)[mine]), mine % 3, reduction_size=6)
        zero.accumulate(loss)
        return optim.SGD(zero.parameters(), 0.1).clip_global_norm(0.1, zero.sum_squares)

    (want,) = cluster(1, "thread").run(worker, 1)
    said = causes.of_norms(cluster(size, "thread").run(worker, stage), want)
    assert said is None, f"stage {stage}: {said}"


@each_stage
@pytest.mark.parametrize("make", [one_layer_unused, one_parameter_unused])
def test_what_is_not_used_leaves_the_weights_of_one_device_and_of_plain_data_parallelism(
    cluster, make, stage
):
    want = trained(cluster(1, "thread"), 0, make())[0][0]
    assert max(np.abs(want[n] - w).max() for n, w in make().state().items()) > 0.01
    plain = trained(cluster(3, "thread"), 0, make(), micro_batches=2)[0][0]
    for size, micro_batches in [(1, 2), (2, 3), (3, 1), (4, 2)]:
        found = trained(cluster(size, "thread"), stage, make(), micro_batches=micro_batches)
        for reference in (want, plain):
            comparison = compare([weights for weights, _ in found], reference)
            assert comparison.ok, (size, micro_batches, comparison)


@pytest.fixture(scope="module")
def alone(cluster):
    """Return the weights of the Transformer after the same steps on one device."""
    return trained(cluster(1, "thread"), 0, transformer())[0][0]


@pytest.mark.gpu
@each_stage
@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize(("model_on", "ranks_on"), [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_buffers_are_where_the_model_is_whatever_the_ranks_device(
    gpu, cluster, stage, flattened, model_on, ranks_on
):
    def worker(group, stage, device, flattened):
        model = nn.MLP([4, 5, 3], "gelu", dtype="float64").freeze(
            "layers.0.weight", "layers.0.bias"
        )
        model.to(device)
        zero = Zero(model.flatten(group.empty) if flattened else model, group, stage)
        optimizer = optim.AdamW(zero.parameters(), 0.1)
        for _ in range(2):
            mine = shard(np.arange(6), group.rank, group.size)
            x = to_device(arrays(6, 4)[mine], device)
            zero.accumulate(nn.cross_entropy(model(x), mine % 3, reduction_size=6))
            optimizer.clip_global_norm(0.1, zero.sum_squares)
            zero.step(optimizer)
        assert {on_gpu(place) for place in zero.copies.buffers} <= {device == "gpu"}
        zero.load_state(zero.state())
        return zero.state()

    (want,) = cluster(1, "thread").run(worker, 1, "cpu", True)
    found = cluster(2, "thread", ranks_on).run(worker, stage, model_on, flattened)
    comparison = compare(found, want)
    assert comparison.ok, comparison


@each_stage
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_may_have_copies_in_other_groups(cluster, alone, stage, shards):
    found = trained(cluster(4, "thread"), stage, transformer(), micro_batches=2, shards=shards)
    comparison = compare([weights for weights, _ in found], alone)
    assert comparison.ok, comparison
    sizes = [layer.flat.size for layer in transformer().layers]
    for rank, (_, held) in enumerate(found):
        forms = [zero_bytes_held(s, sizes, shards, rank % shards) for s in (stage, 0)]
        want, whole = ({"optimizer state": 2 * form["optimizer state"]} for form in forms)
        said = causes.of_bytes_held({"optimizer state": held}, want, whole)  # float64: twice
        assert said is None, f"stage {stage}, rank {rank}, {shards} shards: {said}"


@each_stage
def test_ranks_that_own_nothing_take_part(cluster, stage):
    """Two parameters on four ranks: the last two have no shard, and no state."""
    data = arrays(7, 1), arrays(7, 1, seed=1)
    for sizes in ([1, 1, 1], [1, 2, 1]):
        model = nn.MLP(sizes, activation="gelu", dtype="float64")
        want = trained(cluster(1, "thread"), 0, model, data, loss=nn.squared_error)[0][0]
        more = {"micro_batches": 2, "loss": nn.squared_error}
        found = trained(cluster(4, "thread"), stage, model, data, **more)
        assert compare([weights for weights, _ in found], want).ok
        if sizes == [1, 1, 1]:
            assert [held for _, held in found] == [32, 32, 0, 0]


@each_stage
def test_layers_without_parameters(cluster, stage):
    class Round(nn.Module):
        def forward(self, x, randomness=None):
            return x * 2.0

    def layer(i, c_in, c_out):
        return nn.Linear(c_in, c_out, activation="gelu", name=f"layers.{i}", dtype="float64")

    def model():
        return nn.Sequential([Round(), layer(0, 3, 4), Round(), layer(1, 4, 3)])

    def worker(group, model, stage):
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer = optim.SGD(zero.parameters(), 0.1)
        x = Tensor(arrays(2, 3, seed=group.rank))
        zero.accumulate(nn.cross_entropy(model(x), np.array([0, 1]), 2 * group.size))
        zero.step(optimizer)
        return zero.state()

    found = [cluster(3, "thread").run(worker, model(), s) for s in (stage, 1)]
    assert compare(found[0], found[1][0]).ok
    assert np.abs(found[0][0]["layers.0.weight"] - model().state()["layers.0.weight"]).max() > 1e-3


def test_evaluation_without_a_graph_uses_the_weights_that_state_returns(cluster):
    """A single-device model with these weights gives the same logits, step after step."""

    def worker(group, model, stage):
        x, y = tokens()
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer, found = optim.AdamW(zero.parameters(), 0.05), []
        for _ in range(2):
            zero.accumulate(nn.cross_entropy(model(x), y, y.size * group.size))
            zero.step(optimizer)
            with no_grad():
                found.append((zero.state(), model(x).data))
            zero.state()["head.norm.bias"][...] = zero.state()["head.linear.weight"][...] = 7
        return found

    x, _ = tokens()
    fresh = transformer(dropout=0.0).freeze("head.norm.bias")
    for stage in STAGES:
        model = transformer(dropout=0.0).freeze("head.norm.bias")
        for row in cluster(2, "thread").run(worker, model, stage):
            for weights, logits in row:
                assert weights.keys() == model.named_parameters().keys()
                fresh.load_state(weights)
                assert np.abs(fresh(x).data - logits).max() < 1e-12


def test_what_came_too_early_is_not_used_after_an_update(cluster):
    """Layer 1 is on its way when layer 0 is used alone; then the weights change."""

    def worker(group):
        model = transformer(dropout=0.0)
        zero, (x, y) = Zero(model.flatten(group.empty), group, 3), tokens()
        optimizer = optim.AdamW(zero.parameters(), 0.05)
        zero.accumulate(nn.cross_entropy(model(x), y, y.size * group.size))
        with no_grad():
            hidden = model.layers[0](x)
        zero.step(optimizer)
        with no_grad():
            return zero.state(), hidden.data, model.layers[1](hidden).data

    fresh = transformer(dropout=0.0)
    for weights, hidden, found in cluster(2, "thread").run(worker):
        fresh.load_state(weights)
        assert np.abs(fresh.layers[1](hidden).data - found).max() < 1e-12


# What a caller can get wrong.


def refused(cluster, worker, words):
    with pytest.raises(RankFailed, match=words) as caught:
        cluster(2, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_cannot_be_is_refused(cluster):
    def mlp():
        return nn.MLP([3, 4, 2])

    refused(cluster, lambda g: Zero(mlp(), g, 4), "stages 1, 2 and 3, not 4")
    for shards in (0, 3):
        refused(cluster, lambda g, n=shards: Zero(mlp(), g, 1, n), f"{shards} shards do not make")
    refused(
        cluster, lambda g: Zero(transformer(tied=True), g, 3), "token.weight' belongs to several"
    )
    refused(cluster, lambda g: Zero(mlp().layers[0], g, 2), "needs an nn.Sequential, not Linear")


def loss_of(model, passes=1):
    logits = model(arrays(2, 3, dtype="float32"))
    for _ in range(passes - 1):
        logits = logits + model(arrays(2, 3, dtype="float32"))
    return nn.cross_entropy(logits, np.array([0, 1]), 4)


def test_a_second_reduction_in_a_step_of_stage_1_is_refused(cluster):
    def worker(group):
        model = nn.MLP([3, 4, 2])
        zero = Zero(model, group, 1)
        zero.accumulate(loss_of(model))
        zero.accumulate(loss_of(model))

    refused(cluster, worker, "pass last=False for all micro-batches but the last")


def test_a_step_without_a_reduced_gradient_is_refused(cluster):
    def worker(group, stage):
        model = nn.MLP([3, 4, 2])
        zero = Zero(model, group, stage)
        if stage == 1:
            loss_of(model).backward()
        zero.step(optim.SGD(zero.parameters(), 0.1))

    for stage in STAGES:
        refused(cluster, lambda g, s=stage: worker(g, s), "no gradient has been summed")


@each_stage
def test_a_step_of_an_optimizer_without_the_shards_changes_no_gradient(cluster, stage):
    def worker(group, wrong_step):
        model = nn.MLP([3, 4, 2])
        zero = Zero(model, group, stage)
        zero.accumulate(loss_of(model))
        if wrong_step:
            with pytest.raises(ValueError, match=r"call zero.step|cannot be optimized"):
                optim.SGD(model.parameters(), 0.1).step()
        zero.step(optim.SGD(zero.parameters(), 0.1))
        return zero.state()

    (weights, _), (wanted, _) = (cluster(2, "thread").run(worker, wrong) for wrong in (True, False))
    assert all(np.array_equal(weights[name], w) for name, w in wanted.items())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("summed", [False, True])
def test_a_step_with_gradients_that_have_stayed_whole_is_refused(cluster, stage, summed):
    def worker(group):
        model = nn.MLP([3, 4, 2])
        zero = Zero(model, group, stage)
        if summed:
            zero.accumulate(loss_of(model))
        loss_of(model).backward()
        zero.step(optim.SGD(zero.parameters(), 0.1))

    refused(cluster, worker, "use zero.accumulate")


@each_stage
@pytest.mark.parametrize("tied", [False, True])
def test_two_passes_in_one_loss_have_one_devices_gradient(cluster, stage, tied):
    x, y = tokens(2)

    def loss(model):
        return nn.cross_entropy(model(x) + 2.0 * model(x[::-1]), y)

    def worker(group):
        model = transformer(tied and stage < 3, dropout=0.0)
        zero = Zero(model, group, stage)
        zero.accumulate(loss(model))
        zero.step(optim.SGD(zero.parameters(), 0.1))
        return zero.state()

    model = transformer(tied and stage < 3, dropout=0.0)
    loss(model).backward()
    want = {p.name: p.data - 0.1 * 2 * p.grad for p in model.parameters()}  # two ranks' sum
    comparison = compare(cluster(2, "thread").run(worker), want)
    assert comparison.ok, comparison


# Failures leave nothing behind.


def breaks_off(group, stage, how):
    """Rank 1 ends, one way or another, in the forward or backward pass of layer 2."""
    model = nn.MLP([16] * 5)
    layer, forward = model.layers[2], model.layers[2].forward

    def broken(x, randomness=None):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else None
            raise ZeroDivisionError("on purpose")
        return forward(x, randomness)

    zero = Zero(model.flatten(group.empty), group, stage)
    optimizer = optim.AdamW(zero.parameters(), 0.01)
    for step in range(3):
        if step == 1:
            layer.forward = broken
        loss = nn.cross_entropy(model(np.ones((4, 16), "float32")), np.zeros(4, int), 8)
        zero.accumulate(loss)
        zero.step(optimizer)


def gather_threads():
    return [t for t in threading.enumerate() if t.name == "gather"]


def test_a_rank_that_ends_in_the_middle_leaves_nothing():
    before = set(multiprocessing.active_children())
    with Cluster(2) as ranks:
        for stage, how in [(1, "killed"), (2, "raises"), (3, "killed"), (3, "raises")]:
            with pytest.raises(RankDied if how == "killed" else RankFailed, match="rank 1"):
                ranks.run(breaks_off, stage, how)
            assert set(multiprocessing.active_children()) == before
            assert len(trained(ranks, stage, transformer())) == 2


def test_no_thread_is_left_by_a_training_or_by_a_failure():
    def worker(group, model):
        return train(group, 3, model, *tokens()), [t.name for t in gather_threads()]

    with Cluster(2, "thread") as ranks:
        assert [left for _, left in ranks.run(worker, transformer())] == [[], []]
        with pytest.raises(RankFailed, match="on purpose"):
            ranks.run(breaks_off, 3, "raises")
    gc.collect()
    assert gather_threads() == []


def test_a_failure_of_the_gathering_thread_is_the_ranks_failure(cluster):
    def worker(group):
        model = nn.MLP([3, 4, 4, 2])
        zero = Zero(model, group, 3)
        zero.copies.gatherer.layers[1] = [None]
        zero.accumulate(loss_of(model))

    with pytest.raises(RankFailed, match="AttributeError"):
        cluster(1).run(worker)
