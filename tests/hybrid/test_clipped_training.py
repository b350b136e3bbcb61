"""Clipped steps under every kind of strategy: the weights of one device, or an error.

A rank that holds some of the parameters, or parts, has a norm of its own. To clip by that is wrong
on every rank, and none of them notices.
"""

from functools import partial

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.autograd import no_grad
from minidist.autograd.eight_bits import EightBits
from minidist.context_parallel import ContextParallel
from minidist.data_parallel.parameter_server import ServerPlan, join, train
from minidist.data_parallel.replicated import BucketedDataParallel
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.expert_parallel import ExpertParallel
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel.mixed_precision import multiply_in_eight_bits
from minidist.parallel.trainer import Trainer
from minidist.pipeline_parallel import PipeDream, Pipeline, Siamese
from minidist.rng import Randomness
from minidist.tensor_parallel import SpatialParallel, TensorParallel
from minidist.verify.compare import compare
from tests.strategies import arrays

CLIP = 0.05


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


def on_mesh(model, group, pp=2):
    return Hybrid(model, Mesh(group, dp=1, pp=pp, tp=1), micro_batches=2)


IMAGE = (2, 6, 4)  # channels, rows, columns
WAYS = {
    "zero_1": lambda model, group: Zero(model.flatten(group.empty), group, 1),
    "zero_3": lambda model, group: Zero(model.flatten(group.empty), group, 3),
    "hierarchical_zero": lambda model, group: Zero(model, group, 3, shards=1),
    "bucketed": partial(BucketedDataParallel, cap=300),
    "usp": partial(ContextParallel, attention="ring", ulysses=2),
    "1f1b": partial(Pipeline, micro_batches=4),
    "zb_v": partial(Pipeline, schedule="zb_v", micro_batches=4, chunks=2),
    **{
        name: partial(TensorParallel, split=name)
        for name in ("row", "vocab", "sequence", "channel")
    },
    "spatial": lambda model, group: SpatialParallel(model, group, IMAGE[1]),
    "expert": ExpertParallel,
    "hybrid": on_mesh,
    "eight_bits": on_mesh,
    "siamese": Siamese,
}
CNNS = ("channel", "spatial")


def model_for(name, tied=False):
    if name == "siamese":
        return nn.Siamese([6, 8, 5], classes=3, activation="gelu", dtype="float64")
    if name == "row":
        return nn.MLP([6, 8, 8, 4], activation="gelu", dtype="float64")
    if name in CNNS:
        return nn.CNN(IMAGE[0], 3, (4, 6), dtype="float64")
    more = {"experts": 3, "balance": 0.1} if name == "expert" else {}
    model = nn.Transformer(7, 8, 2, 2, 4, dtype="float64", dropout=0.2, tied=tied, **more)
    if name == "eight_bits":
        multiply_in_eight_bits(model, EightBits(4))
    return model


def batches(name):
    """Three batches of other sizes, the last one of a single example."""
    for step, size in enumerate([6, 3, 1]):
        if name in ("siamese", "row"):
            shape = (size, 2, 6) if name == "siamese" else (size, 6)
            yield Batch(arrays(*shape, seed=step), np.arange(size) % 3, 0, step)
        elif name in CNNS:
            yield Batch(arrays(size, *IMAGE, seed=step), np.arange(size) % 3, 0, step)
        else:
            yield Batch(*np.random.default_rng(step).integers(0, 7, (2, size, 4)), 0, step)


def train_clipped(group, way, name, model, clip=True):
    """Return (the norm before each step, and the loss after it, the weights at the end)."""
    ours = way(model, group)
    optimizer = optim.AdamW(ours.parameters(), 0.01, weight_decay=0.3)
    norms = []
    for batch in batches(name):
        ours.backward(batch)
        norms.append(optimizer.clip_global_norm(CLIP, ours.sum_squares if clip else None))
        optimizer.lr = 0.01 / (batch.step + 1)
        ours.step(optimizer)
        norms.append(ours.evaluate(batch))
    return norms, ours.state()


def assert_like_one_device(cluster, way, name, model, size):
    (norms, weights), *_ = cluster(1, "thread").run(
        train_clipped, lambda model, group: OneDevice(model, group), name, model
    )
    assert min(norms[::2]) > CLIP, "every step is clipped"
    for got, state in cluster(size, "thread").run(train_clipped, way, name, model):
        np.testing.assert_allclose(got, norms, rtol=1e-9)
        comparison = compare([state], weights)
        assert comparison.ok, comparison


@pytest.mark.parametrize("name", WAYS)
def test_clipped_steps_and_evaluations_are_those_of_one_device(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name), 2)


@pytest.mark.parametrize("name", ["1f1b", "vocab", "sequence"])
def test_a_tied_embedding_counts_once(cluster, name):
    assert_like_one_device(cluster, WAYS[name], name, model_for(name, tied=True), 2)


@pytest.mark.parametrize(
    "way, frozen", [(WAYS["1f1b"], "blocks.0"), (partial(on_mesh, pp=4), "head")]
)
def test_a_stage_that_is_all_frozen_trains_along(cluster, way, frozen):
    """Its rank has an optimizer over nothing, and takes part in the norm."""
    model = nn.Transformer(7, 8, 2, 2, 4, dtype="float64", dropout=0.2)
    model.freeze(*(name for name in model.named_parameters() if name.startswith(frozen)))
    assert_like_one_device(cluster, way, "1f1b", model, 4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["zero_3", "1f1b", "row", "sequence", "expert", "hybrid"])
def test_the_norm_of_one_rank_alone_is_refused_also_where_there_is_one_rank(cluster, name, size):
    way = partial(on_mesh, pp=size) if name == "hybrid" else WAYS[name]
    with pytest.raises(RankFailed, match=r"(?s)alone is not the global one.*pass sum_squares="):
        worker = partial(train_clipped, clip=False)
        cluster(size, "thread").run(worker, way, name, model_for(name))


class Clipped(optim.SGD):
    def step(self):
        self.clip_global_norm(1.0)
        super().step()


def asynchronous(group):
    pipe = PipeDream(nn.MLP([4, 4, 4, 2]), group, lambda p: Clipped(p, 0.1))
    pipe.train(Batch(np.ones((4, 4), "float32"), np.zeros(4, int)).micro_batches(2))


def served(group):
    role = join(group, nn.MLP([4, 4, 2]), partial(Clipped, lr=0.1), ServerPlan(2))
    train(role, lambda model, number: model(np.ones((1, 4), "f4")).sum().backward(), range(1))


@pytest.mark.parametrize(
    "worker, message",
    [
        (asynchronous, "update at different times, so that there is no global norm"),
        (served, "spread over 2 servers, none of which has the whole"),
    ],
)
def test_who_has_no_norm_to_clip_by_is_refused(cluster, worker, message):
    with pytest.raises(RankFailed, match=message):
        cluster(3, "thread").run(worker)
