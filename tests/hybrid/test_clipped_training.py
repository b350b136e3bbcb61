"""Five clipped steps under every strategy: the weights of one device, or an error.

A rank that holds some of the parameters, or parts, has a norm of its own. To clip by that is wrong
on every rank, and none of them notices.
"""

from functools import partial

import numpy as np
import pytest

from minidist import Cluster, Mesh, nn, optim
from minidist.autograd import no_grad
from minidist.autograd.eight_bits import EightBits
from minidist.context_parallel import ContextParallel
from minidist.data_parallel.parameter_server import ServerPlan, join, train
from minidist.data_parallel.replicated import BucketedDataParallel, DataParallel
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.expert_parallel import ExpertParallel
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel.mixed_precision import multiply_in_eight_bits
from minidist.parallel.trainer import Trainer, loss_of
from minidist.pipeline_parallel import PipeDream, Pipeline, Siamese
from minidist.rng import Randomness
from minidist.tensor_parallel import SpatialParallel, TensorParallel
from minidist.verify import equivalence
from minidist.verify.compare import compare
from minidist.verify.strategies import STRATEGIES
from minidist.verify.strategies.pipeline_parallel import drawn
from tests.strategies import SYNCHRONOUS, arrays, chunks_of

STEPS, CLIP = 5, 0.05


class OneDevice(Trainer):
    """What one device computes, with an `evaluate` in a reader's words."""

    def share(self, batch):
        return batch

    def sum_gradients(self):
        pass

    def evaluate(self, batch):
        self.model.eval()
        with no_grad():
            known = Randomness(None, 0, batch.examples, counted=batch.counted)
            loss = self.model.loss(self.model(batch.inputs, known), batch.targets)
        self.model.train()
        return loss.item()


def data_parallel(group, name, model, loss):
    model.flatten(group.empty)
    return Zero(model, group, int(name[-1])) if "zero" in name else DataParallel(model, group)


def on_two_levels(group, name, model, loss):
    return Zero(model.flatten(group.empty), group, 3, shards=max(1, group.size // 2))


def bucketed(group, name, model, loss):
    return BucketedDataParallel(model, group, cap=300)


def pipeline(group, order, model, loss):
    shape = {"micro_batches": 4, "chunks": chunks_of(order)} if isinstance(order, str) else {}
    return Pipeline(model, group, order, loss=loss, **shape)


def own_order(group, name, model, loss):
    return pipeline(group, drawn(len(model.layers), group.size), model, loss)


def hybrid(group, name, model, loss, dp=1, pp=2, tp=1, **options):
    return Hybrid(model, Mesh(group, dp=dp, pp=pp, tp=tp), micro_batches=2, **options)


def split(group, name, model, loss):
    return TensorParallel(model, group, name)


def siamese(group, name, model, loss):
    return Siamese(model, group)


def context(group, name, model, loss):
    attention = "ring" if name == "usp" else name.removesuffix("_attention")
    return ContextParallel(model, group, attention, ulysses=2 if name == "usp" else 1)


def experts(group, name, model, loss):
    return ExpertParallel(model, group)


def image_rows(group, name, model, loss):
    return SpatialParallel(model, group, IMAGE[1])


CNNS = ("channel", "spatial", "sync_batch_norm")
IMAGE = (2, 6, 4)  # channels, rows, columns
WAYS = {
    **dict.fromkeys(("naive", "zero_1", "zero_2", "zero_3", "sync_batch_norm"), data_parallel),
    "hierarchical_zero": on_two_levels,
    "bucketed": bucketed,
    **dict.fromkeys(("ring_attention", "gathered_attention", "ulysses", "usp"), context),
    **dict.fromkeys(SYNCHRONOUS, pipeline),
    "pipeline": own_order,
    **dict.fromkeys(("column", "row", "attention", "vocab", "sequence", "channel"), split),
    "spatial": image_rows,
    "expert": experts,
    **dict.fromkeys(("hybrid", "muon", "eight_bits"), hybrid),
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
    model = nn.Transformer(7, 8, 2, 2, 4, dtype="float64", dropout=0.2, tied=tied, **more)
    if name == "eight_bits":
        multiply_in_eight_bits(model, EightBits(4))
    return model


def batches(name):
    """Five batches of other sizes, the last one of a single example."""
    for step, size in enumerate([6, 3, 7, 5, 1]):
        if name in ("siamese", "column", "row"):
            shape = (size, 2, 6) if name == "siamese" else (size, 6)
            yield Batch(arrays(*shape, seed=step), np.arange(size) % 3, 0, step)
        elif name in CNNS:
            yield Batch(arrays(size, *IMAGE, seed=step), np.arange(size) % 3, 0, step)
        else:
            yield Batch(*np.random.default_rng(step).integers(0, 7, (2, size, 4)), 0, step)


def train_clipped(group, way, name, model, clip=True, **options):
    """Return (the norm before each step, and the loss after it, the weights at the end)."""
    ours = way(group, name, model, nn.cross_entropy, **options)
    optimizer = optim.AdamW(ours.parameters(), 0.01, weight_decay=0.3)
    norms = []
    for batch in batches(name):
        ours.backward(batch)
        norms.append(optimizer.clip_global_norm(CLIP, ours.sum_squares if clip else None))
        optimizer.lr = 0.01 / (batch.step + 1)
        ours.step(optimizer)
        norms.append(ours.evaluate(batch))
    return norms, ours.state()


def on_one_device(name, model):
    def alone(group, name, model, loss):
        return OneDevice(model, group)

    norms, weights = Cluster(1, "thread").run(train_clipped, alone, name, model)[0]
    assert min(norms[::2]) > CLIP, "every step is clipped"
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
def test_five_clipped_steps_and_evaluations_are_those_of_one_device(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name), 2)


@pytest.mark.parametrize(
    "name", ["1f1b", "zb_v", "vocab", "sequence", "zero_2", "ulysses", "expert"]
)
def test_a_tied_embedding_counts_once(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name, tied=True), 2)


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
        role = join(group, model, optimizer, ServerPlan(servers))

        def backward(model, number):
            part = stream[number].share(group.rank - servers, group.size - servers)
            loss_of(model, part).backward()

        train(role, backward, range(STEPS))
        return role.optimizer.norms if group.rank == 0 else None, model.state()

    ranks = cluster(3, "thread").run(worker, 1)
    np.testing.assert_allclose(ranks[0][0], norms[::2], rtol=1e-9)
    assert compare([state for _, state in ranks], weights).ok
    with pytest.raises(RankFailed, match="spread over 2 servers, none of which has the whole"):
        cluster(4, "thread").run(worker, 2)


WHOLE = (
    data_parallel,
    bucketed,
    context,
    image_rows,
)  # a rank has the whole model and its whole gradient
LOCAL = [name for name in WAYS if WAYS[name] not in WHOLE or "zero" in name]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", LOCAL)
def test_the_norm_of_one_rank_alone_is_refused_also_where_there_is_one_rank(cluster, name, size):
    options = {"pp": size} if WAYS[name] is hybrid else {}
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
        pipe.train(Batch(np.ones((4, 4), "float32"), np.zeros(4, int)).micro_batches(2))

    with pytest.raises(
        RankFailed, match="update at different times, so that there is no global norm"
    ):
        cluster(2, "thread").run(worker)


def test_every_strategy_is_here():
    asynchronous = {"pipedream", "pipedream_2bw", "downpour", "ssp"}
    changed = {name for name, record in STRATEGIES.items() if record.promise == "invariant"}
    elsewhere = {"parameter_server"} | changed  # whose weights are not one device's on purpose
    assert {*WAYS} | elsewhere | asynchronous == set(equivalence.strategies())
