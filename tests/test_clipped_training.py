"""Five clipped steps under every strategy: the weights of one device, or an error.

A rank that holds some of the parameters, or parts, has a norm of its own. To clip by that is wrong
on every rank, and none of them notices.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from minidist import Mesh, nn, optim, tensor_parallel
from minidist.backend import to_host
from minidist.context_parallel import columns, context_parallel, zigzag
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import Plan, join, train
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.data_parallel.zero import Zero
from minidist.datasets import shard
from minidist.errors import RankFailed
from minidist.expert_parallel import ExpertParallel
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel import PipeDream, Pipeline, branch_placement
from minidist.pipeline_parallel.micro_batch import micro_batches
from minidist.replicas import sum_gradients
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial
from minidist.tensor_parallel.spatial_parallel import own_rows, spatial_parallel, sum_partial
from minidist.tools import equivalence
from minidist.tools.compare import compare
from minidist.tools.strategies import STRATEGIES, Case
from minidist.tools.strategies.program import drawn
from tests.strategies import SYNCHRONOUS, arrays, chunks_of

STEPS, CLIP = 5, 0.05


@dataclass
class Trained:
    """How a strategy trains on a rank: what a loop needs of it."""

    parameters: list
    backward: Any
    state: Any
    sum_squares: Any = None
    step: Any = None


def data_parallel(group, name, model, loss):
    if name == "sync_batch_norm":
        sync_batch_norm(model, group)
    zero = Zero(model.flatten(group.empty), group, int(name[-1])) if "zero" in name else None
    reducer = Bucketed(model, group, 300) if name == "bucketed" else None

    def backward(x, y, step):
        rows = shard(np.arange(len(x)), group.rank, group.size)
        part = loss(model(x[rows], Randomness(0, step, rows)), y[rows], y.size)
        if zero:
            zero.backward(part)
        elif reducer:
            with reducer.reduce():
                part.backward()
        else:
            part.backward()
            all_reduce_gradients(model, group)

    if zero:
        return Trained(zero.parameters(), backward, zero.state, zero.sum_squares, zero.step)
    return Trained(model.parameters(), backward, model.state)


def pipeline(group, order, model, loss):
    shape = {"micro_batches": 4, "chunks": chunks_of(order)} if isinstance(order, str) else {}
    pipe = Pipeline(model, group, order, loss=loss, **shape)
    backward = partial(in_pipeline, pipe)
    return Trained(pipe.parameters(), backward, pipe.state, pipe.sum_squares)


def own_order(group, name, model, loss):
    return pipeline(group, drawn(len(model.layers), group.size), model, loss)


def in_pipeline(pipe, x, y, step):
    pipe.backward(x, y, 0, step)


def hybrid(group, name, model, loss, dp=1, pp=2, tp=1, **options):
    mesh = Mesh(group, dp=dp, pp=pp, tp=tp)
    ours = Hybrid(model, mesh, micro_batches=2, **options)
    backward = partial(in_pipeline, ours)
    return Trained(ours.parameters(), backward, ours.state, ours.sum_squares)


def split(group, name, model, loss):
    case = Case("", model, np.zeros((1, 1)), np.zeros(1), loss)
    model, own_loss = STRATEGIES[name].worker.keywords["split"](group, case)

    def backward(x, y, step):
        own_loss(model(x, Randomness(0, step, np.arange(len(x)))), y).backward()
        if name == "sequence":
            all_reduce_partial(model, group)

    def state():
        named = model.named_parameters().items()
        return {n: to_host(tensor_parallel.unsplit(p.data, p, group)) for n, p in named}

    squares = partial(tensor_parallel.sum_squares, model, group)
    return Trained(model.parameters(), backward, state, squares)


def siamese(group, name, model, loss):
    def backward(x, y, step):
        branch_placement.forward_backward(model, x, y, group, loss, y.size)
        branch_placement.all_reduce_shared(model, group)

    def state():
        own = model.state()
        return {n: group.broadcast(w) if "join" in n else w for n, w in own.items()}

    own = branch_placement.own_parameters(model, group)
    return Trained(own, backward, state, partial(branch_placement.sum_squares, model, group))


def context(group, name, model, loss):
    model = context_parallel(model, group, name.removesuffix("_attention"))

    def backward(x, y, step):
        held = zigzag(x.shape[1], group.size)[group.rank]
        randomness = Randomness(0, step, np.arange(len(x)), positions=held)
        loss(model(columns(x, held), randomness), columns(y, held), y.size).backward()
        sum_gradients(model.parameters(), group)

    return Trained(model.parameters(), backward, model.state)


def experts(group, name, model, loss):
    model = ExpertParallel(model, group)

    def backward(x, y, step):
        rows = shard(np.arange(len(x)), group.rank, group.size)
        loss(model(x[rows], Randomness(0, step, rows, len(x))), y[rows], y.size).backward()
        model.sum_gradients()

    return Trained(model.parameters(), backward, model.state, model.sum_squares)


def image_rows(group, name, model, loss):
    model = spatial_parallel(model, group, IMAGE[1])

    def backward(x, y, step):
        loss(model(own_rows(x, group)), y, y.size).backward()
        sum_partial(model, group)

    return Trained(model.parameters(), backward, model.state)


CNNS = ("channel", "spatial", "sync_batch_norm")
IMAGE = (2, 6, 4)  # channels, rows, columns
WAYS = {
    **dict.fromkeys(("naive", "bucketed", "zero_1", "zero_2", "zero_3"), data_parallel),
    **dict.fromkeys(("ring_attention", "ulysses"), context),
    **dict.fromkeys(SYNCHRONOUS, pipeline),
    "pipeline": own_order,
    **dict.fromkeys(("column", "row", "attention", "vocab", "sequence", "channel"), split),
    "sync_batch_norm": data_parallel,
    "spatial": image_rows,
    "expert": experts,
    "hybrid": hybrid,
    "siamese": siamese,
}


def model_for(name, tied=False):
    if name == "siamese":
        return nn.Siamese([6, 8, 5], classes=3, activation="gelu", dtype="float64")
    if name in ("column", "row"):
        return nn.MLP([6, 8, 8, 4], activation="gelu", dtype="float64")
    if name in CNNS:
        return nn.CNN(IMAGE[0], 3, (4, 6), dtype="float64")
    more = {"experts": 3, "balance": 0.1} if name == "expert" else {}
    return nn.Transformer(7, 8, 2, 2, 4, dtype="float64", dropout=0.2, tied=tied, **more)


def batches(name):
    """Five batches of other sizes, the last one of a single example."""
    for step, size in enumerate([6, 3, 7, 5, 1]):
        if name in ("siamese", "column", "row"):
            shape = (size, 2, 6) if name == "siamese" else (size, 6)
            yield step, arrays(*shape, seed=step), np.arange(size) % 3
        elif name in CNNS:
            yield step, arrays(size, *IMAGE, seed=step), np.arange(size) % 3
        else:
            yield step, *np.random.default_rng(step).integers(0, 7, (2, size, 4))


def train_clipped(group, way, name, model, clip=True, **options):
    """Return (the norm before each step, the weights after five), on a rank."""
    ours = way(group, name, model, nn.cross_entropy, **options)
    optimizer = optim.AdamW(ours.parameters, 0.01, weight_decay=0.3)
    step_with = ours.step or optim.AdamW.step
    norms = []
    for step, x, y in batches(name):
        ours.backward(x, y, step)
        norms.append(optimizer.clip_global_norm(CLIP, ours.sum_squares if clip else None))
        optimizer.lr = 0.01 / (step + 1)
        step_with(optimizer)
        optimizer.zero_grad()
    return norms, ours.state()


def on_one_device(name, model):
    def alone(group, name, model, loss):
        def backward(x, y, step):
            loss(model(x, Randomness(0, step, np.arange(len(x)))), y).backward()

        return Trained(model.parameters(), backward, model.state)

    norms, weights = train_clipped(None, alone, name, copy.deepcopy(model))
    assert min(norms) > CLIP, "every step is clipped"
    return norms, weights


def assert_like_one_device(cluster, way, name, model, size, **options):
    norms, weights = on_one_device(name, model)
    for got, state in cluster(size, "thread").run(
        partial(train_clipped, **options), way, name, model
    ):
        np.testing.assert_allclose(got, norms, rtol=1e-9)
        comparison = compare([state], weights)
        assert comparison.ok, comparison


@pytest.mark.parametrize("name", WAYS)
def test_five_clipped_steps_leave_the_weights_of_one_device(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name), 2)


@pytest.mark.parametrize(
    "name", ["1f1b", "zb_v", "vocab", "sequence", "zero_2", "ulysses", "expert"]
)
def test_a_tied_embedding_counts_once(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name, tied=True), 2)


def meshes():
    for axes in [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (1, 1, 4), (2, 2, 2)]:
        for tied in (False, True):
            for more in ({}, {"split_sequence": True}, {"schedule": "zb_h1"}):
                few = (tied, more) == (True, {}) or (axes, tied) == ((1, 2, 2), True)
                yield pytest.param(axes, tied, more, marks=[] if few else pytest.mark.slow)


@pytest.mark.parametrize(("axes", "tied", "more"), list(meshes()))
def test_five_clipped_steps_on_a_mesh_leave_the_weights_of_one_device(cluster, axes, tied, more):
    model = nn.Transformer(7, 8, 4, 2, 4, dtype="float64", dropout=0.2, tied=tied)
    options = dict(zip(("dp", "pp", "tp"), axes, strict=True)) | more
    assert_like_one_device(cluster, hybrid, "hybrid", model, int(np.prod(axes)), **options)


@pytest.mark.parametrize("frozen", ["embedding", "blocks.0", "head"])
@pytest.mark.parametrize("way", [pipeline, hybrid])
def test_a_stage_that_is_all_frozen_trains_along(cluster, way, frozen):
    """Its rank has an optimizer over nothing, and takes part in the norm."""
    model = nn.Transformer(7, 8, 2, 2, 4, dtype="float64", dropout=0.2)
    model.freeze(*(name for name in model.named_parameters() if name.startswith(frozen)))
    options = {"pp": 4} if way is hybrid else {}
    assert_like_one_device(cluster, way, "1f1b", model, 4, **options)


def test_a_server_clips_what_it_is_pushed(cluster):
    """One server has all parameters; of two, neither has the norm."""
    model = model_for("parameter_server")
    norms, weights = on_one_device("parameter_server", model)

    class Clipped(optim.AdamW):
        def step(self):
            self.norms = [*vars(self).get("norms", []), self.clip_global_norm(CLIP)]
            self.lr = 0.01 / (self.steps + 1)
            super().step()

    def worker(group, servers):
        stream = list(batches("parameter_server"))
        optimizer = partial(Clipped, lr=0.01, weight_decay=0.3)
        role = join(group, model, optimizer, Plan(servers))

        def backward(model, batch):
            _, x, y = stream[batch]
            rows = shard(np.arange(len(x)), group.rank - servers, group.size - servers)
            logits = model(x[rows], Randomness(0, batch, rows))
            nn.cross_entropy(logits, y[rows], y.size).backward()

        train(role, backward, range(STEPS))
        return role.optimizer.norms if group.rank == 0 else None, model.state()

    ranks = cluster(3, "thread").run(worker, 1)
    np.testing.assert_allclose(ranks[0][0], norms, rtol=1e-9)
    assert compare([state for _, state in ranks], weights).ok
    with pytest.raises(RankFailed, match="spread over 2 servers, none of which has the whole"):
        cluster(4, "thread").run(worker, 2)


WHOLE = (data_parallel, context, image_rows)  # a rank has the whole model and its whole gradient
LOCAL = [name for name in WAYS if WAYS[name] not in WHOLE or "zero" in name]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_the_norm_of_one_rank_alone_is_refused_also_where_there_is_one_rank(cluster, name, size):
    options = {"pp": size} if name == "hybrid" else {}
    with pytest.raises(RankFailed, match="alone is not the global one") as failed:
        worker = partial(train_clipped, clip=False, **options)
        cluster(size, "thread").run(worker, WAYS[name], name, model_for(name))
    assert isinstance(failed.value.__cause__, ValueError)
    assert "pass sum_squares=" in str(failed.value)


def test_an_asynchronous_pipeline_has_no_norm_to_clip_by(cluster):
    def worker(group):
        class Clipped(optim.SGD):
            def step(self):
                self.clip_global_norm(1.0)
                super().step()

        pipe = PipeDream(nn.MLP([4, 4, 2]), group, lambda p: Clipped(p, 0.1))
        pipe.train(micro_batches(np.ones((4, 4), "float32"), np.zeros(4, int), 2))

    with pytest.raises(
        RankFailed, match="update at different times, so that there is no global norm"
    ):
        cluster(2, "thread").run(worker)


def test_every_strategy_is_here():
    asynchronous = {"pipedream", "pipedream_2bw", "downpour", "ssp"}
    changed = {name for name, record in STRATEGIES.items() if record.promise == "invariant"}
    elsewhere = {"parameter_server"} | changed  # whose weights are not one device's on purpose
    assert {*WAYS} | elsewhere | asynchronous == set(equivalence.strategies())
