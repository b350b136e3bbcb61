"""ZeRO's three stages train as one device does, whatever is cut, and whoever owns nothing.

All train alike: AdamW, weight decay, clipping, micro-batches, dropout.
"""

import gc
import multiprocessing
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest

from minidist import Cluster, nn, no_grad, optim
from minidist.backend import on_gpu, to_device
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.errors import RankDied, RankFailed
from minidist.nn.datasets import Sampler, shard
from minidist.planning.costs.zero import zero_bytes_held
from minidist.rng import Randomness
from minidist.verify.compare import compare
from tests import causes
from tests.strategies import arrays

STAGES = [1, 2, 3]
each_stage = pytest.mark.parametrize("stage", STAGES)


def tokens(examples=13, vocab=7, context=4, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (2, examples, context))


def losses(model, inputs, targets, step, share, loss):
    """Yield (loss, whether it is the step's last one) of this rank's micro-batches."""
    for i, examples in enumerate(share.micro_batches):
        logits = model(inputs[examples], Randomness(1, step, examples))
        total = share.total * targets[0].size
        yield loss(logits, targets[examples], total), i == len(share.micro_batches) - 1


def train(
    group,
    stage,
    model,
    inputs,
    targets,
    steps=5,
    micro_batches=1,
    shards=None,
    loss=nn.cross_entropy,
):
    """Take some steps; return the weights, and the bytes of optimizer state on this rank.

    stage  0: plain data parallelism (on one rank, a single device); 1, 2, 3: ZeRO. Batches
           have 5 examples, and an epoch's last one has what is left.
    """
    model.flatten(group.empty)
    zero = Zero(model, group, stage, shards) if stage else None
    parameters = zero.parameters() if stage else model.parameters()
    optimizer = optim.AdamW(parameters, 0.01, weight_decay=0.1)
    shares = iter(Sampler(len(inputs), 5, 3, group.rank, group.size, micro_batches))
    for step in range(steps):
        for l, last in losses(model, inputs, targets, step, next(shares), loss):
            if stage:
                zero.accumulate(l, last)
            else:
                l.backward()
        if stage:
            optimizer.clip_global_norm(0.5, zero.sum_squares)
            zero.step(optimizer)
        else:
            all_reduce_gradients(model, group)
            optimizer.clip_global_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
    held = sum(array.nbytes for state in optimizer.state for array in state)
    return (zero.state() if stage else model.state()), held


def trained(ranks, stage, model, data=None, **more):
    """Return [(weights, bytes of optimizer state) per rank] after some steps, tokens or `data`."""
    return ranks.run(partial(train, **more), stage, model, *(data or tokens()))


def transformer(tied=False, dropout=0.2):
    return nn.Transformer(7, 6, 2, 2, 4, dtype="float64", dropout=dropout, tied=tied)


def partly_used():
    """Return a model whose second block is not used, and one parameter of the first one."""

    class Partial(nn.Sequential):
        def forward(self, x, randomness=None):
            embedding, first, _, head = self.layers
            return head(first(embedding(x, randomness), randomness))

    model = Partial(transformer().layers)
    model.layers[1].extra = nn.Parameter(arrays(3, 3), "blocks.0.extra")
    return model.flatten()


@each_stage
@pytest.mark.parametrize("size", [2, 3])
def test_the_norm_that_clips_is_one_devices_on_every_rank(cluster, stage, size):
    def worker(group, stage):
        model = nn.MLP([4, 5, 3], "gelu", dtype="float64").flatten(group.empty)
        zero = Zero(model, group, stage)
        mine = shard(np.arange(6), group.rank, group.size)
        loss = nn.cross_entropy(model(arrays(6, 4)[mine]), mine % 3, reduction_size=6)
        zero.accumulate(loss)
        return optim.SGD(zero.parameters(), 0.1).clip_global_norm(0.1, zero.sum_squares)

    (want,) = cluster(1, "thread").run(worker, 1)
    found = cluster(size, "thread").run(worker, stage)
    np.testing.assert_allclose(found, want, rtol=4e-10, err_msg=f"stage {stage}")


@each_stage
def test_what_is_not_used_leaves_the_weights_of_one_device(cluster, stage):
    want = trained(cluster(1, "thread"), 0, partly_used(), steps=3)[0][0]
    assert max(np.abs(want[n] - w).max() for n, w in partly_used().state().items()) > 0.01
    found = trained(cluster(3, "thread"), stage, partly_used(), steps=3, micro_batches=2)
    comparison = compare([weights for weights, _ in found], want)
    assert comparison.ok, comparison


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
@pytest.mark.parametrize("shards", [2, 4])
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
    model = nn.MLP([1, 1, 1], activation="gelu", dtype="float64")
    want = trained(cluster(1, "thread"), 0, model, data, loss=nn.squared_error)[0][0]
    more = {"micro_batches": 2, "loss": nn.squared_error}
    found = trained(cluster(4, "thread"), stage, model, data, **more)
    assert compare([weights for weights, _ in found], want).ok
    assert [held for _, held in found] == [32, 32, 0, 0]


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


# What a caller can get wrong.


def mlp():
    return nn.MLP([3, 4, 2])


def loss_of(model):
    logits = model(arrays(2, 3, dtype="float32"))
    return nn.cross_entropy(logits, np.array([0, 1]), 4)


def two_reductions(group):
    zero = Zero(model := mlp(), group, 1)
    zero.accumulate(loss_of(model))
    zero.accumulate(loss_of(model))


def step_after(group, stage, summed, whole):
    zero = Zero(model := mlp(), group, stage)
    if summed:
        zero.accumulate(loss_of(model))
    if whole:
        loss_of(model).backward()
    zero.step(optim.SGD(zero.parameters(), 0.1))


@pytest.mark.parametrize(
    "worker, message",
    [
        (lambda g: Zero(mlp(), g, 4), "stages 1, 2 and 3, not 4"),
        (lambda g: Zero(mlp(), g, 1, 3), "groups of 3 shards do not make up 2 ranks; use a divis"),
        (lambda g: Zero(mlp(), g, 1, 1.5), "groups of 1.5 shards do not make up 2 ranks"),
        (lambda g: Zero(transformer(tied=True), g, 3), "token.weight' belongs to several"),
        (lambda g: Zero(mlp().layers[0], g, 2), "needs an nn.Sequential, not Linear"),
        (lambda g: Zero(mlp(), g, 2, block=64), "stage 2 gathers no weights in a pass to quant"),
        (lambda g: Zero(mlp(), g, 3, block=2.5), "block is a whole number from 1, not 2.5"),
        (two_reductions, "pass last=False for all micro-batches but the last"),
        (partial(step_after, stage=1, summed=False, whole=True), "no gradient has been summed"),
        (partial(step_after, stage=3, summed=False, whole=False), "no gradient has been summed"),
        (partial(step_after, stage=2, summed=True, whole=True), "use zero.accumulate"),
        (partial(step_after, stage=3, summed=False, whole=True), "use zero.accumulate"),
    ],
)
def test_what_cannot_be_is_refused(cluster, worker, message):
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(2, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("stage, tied", [(1, True), (3, False)])
def test_two_passes_in_one_loss_have_one_devices_gradient(cluster, stage, tied):
    x, y = tokens(2)

    def loss(model):
        return nn.cross_entropy(model(x) + 2.0 * model(x[::-1]), y)

    def worker(group):
        model = transformer(tied, dropout=0.0)
        zero = Zero(model, group, stage)
        zero.accumulate(loss(model))
        zero.step(optim.SGD(zero.parameters(), 0.1))
        return zero.state()

    model = transformer(tied, dropout=0.0)
    loss(model).backward()
    want = {p.name: p.data - 0.1 * 2 * p.grad for p in model.parameters()}  # two ranks' sum
    comparison = compare(cluster(2, "thread").run(worker), want)
    assert comparison.ok, comparison


# Failures leave nothing behind.


def breaks_off(group, stage, how):
    """Rank 1 ends, one way or another, in the forward pass of layer 2."""
    model = nn.MLP([16] * 5)

    def broken(x, randomness=None):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else None
            raise ZeroDivisionError("on purpose")

    zero = Zero(model.flatten(group.empty), group, stage)
    model.layers[2].forward = broken
    zero.accumulate(nn.cross_entropy(model(np.ones((4, 16), "float32")), np.zeros(4, int), 8))


def test_a_rank_that_ends_in_the_middle_leaves_no_process_and_no_thread():
    before = set(multiprocessing.active_children())
    with Cluster(2) as ranks:
        with pytest.raises(RankDied, match="rank 1"):
            ranks.run(breaks_off, 3, "killed")
        assert set(multiprocessing.active_children()) == before
        assert len(trained(ranks, 3, transformer())) == 2
    with Cluster(2, "thread") as ranks:
        with pytest.raises(RankFailed, match="on purpose"):
            ranks.run(breaks_off, 3, "raises")
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "gather"]


def test_a_failure_of_the_gathering_thread_is_the_ranks_failure(cluster):
    def worker(group):
        model = nn.MLP([3, 4, 4, 2])
        zero = Zero(model, group, 3)
        zero.copies.gatherer.layers[1] = [None]
        zero.accumulate(loss_of(model))

    with pytest.raises(RankFailed, match="AttributeError"):
        cluster(1).run(worker)
