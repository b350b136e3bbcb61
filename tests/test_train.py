"""The training loop of the command line: what it certifies, and what it refuses to begin."""

import threading
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from minidist import optim
from minidist.datasets import Text, numbers
from minidist.errors import RankFailed
from minidist.kinds import model_of
from minidist.rng import Randomness
from minidist.settings import Settings
from minidist.tools.certificate import certify
from minidist.tools.compare import compare
from minidist.train import data_parallel_backward, train, windows
from tests.strategies import SYNCHRONOUS, fitting, gradients

MESHES = [mesh for mesh in product(range(1, 9), repeat=3) if np.prod(mesh) <= 8]
SMALL = [(1, 2, 1), (2, 1, 2)]
FEW = [(schedule, mesh, tied) for schedule, mesh in product(SYNCHRONOUS, SMALL) for tied in (0, 1)]
ALL = list(product(SYNCHRONOUS, MESHES, (0, 1)))
FIVE = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")


def certificate(schedule: str, mesh: tuple[int, int, int], tied: int) -> dict:
    """Certify a model with as many layers, heads and micro-batches as the mesh needs."""
    dp, pp, tp = mesh
    settings = Settings(
        context=3,
        width=2 * tp,
        heads=tp,
        depth=max(1, 2 * pp - 2),
        dropout=0.1,
        tied=bool(tied),
        dp=dp,
        pp=pp,
        tp=tp,
        schedule=schedule,
        micro_batches=fitting(schedule, pp, pp),
    )
    text = Text(np.arange(80) * 7 % 5, "abcde", "a text of five characters")
    return certify(model_of(text, settings), text, settings, "thread")


@pytest.mark.parametrize(
    "schedule, mesh, tied",
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW)],
    ids=str,
)
def test_every_synchronous_schedule_is_certified_on_every_mesh(schedule, mesh, tied):
    row = certificate(schedule, mesh, tied)
    assert row["ok"], row["detail"]


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_training_on_a_mesh_clips_by_the_norm_that_one_rank_has(cluster, monkeypatch, mesh):
    text = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")
    norms, clip = defaultdict(list), optim.Optimizer.clip_global_norm

    def noted(self, max_norm, sum_squares=None):
        norms[threading.get_ident()].append(clip(self, max_norm, sum_squares))

    def norms_on(dp, pp, tp):
        norms.clear()
        settings = Settings(
            steps=3, batch=6, context=8, width=16, dp=dp, pp=pp, tp=tp, micro_batches=3
        )
        cluster(dp * pp * tp, "thread").run(train, text, settings)
        return list(norms.values())

    monkeypatch.setattr(optim.Optimizer, "clip_global_norm", noted)
    (want,) = norms_on(1, 1, 1)
    found = norms_on(*mesh)
    assert len(found) == np.prod(mesh) and len(want) == 3
    np.testing.assert_allclose(found, [want] * len(found), rtol=1e-4)


def test_without_shuffling_every_epoch_has_the_order_of_the_data(cluster, monkeypatch):
    """400 characters are 49 windows of 8 and what each predicts: 25 in a batch, then 24."""
    seen = []

    def noted(group, model, inputs, targets, seed, step, examples, loss_scale):
        seen.append(examples)
        return data_parallel_backward(group, model, inputs, targets, seed, step, examples)

    monkeypatch.setattr("minidist.train.data_parallel_backward", noted)
    for shuffle in (True, False):
        settings = Settings(steps=4, batch=25, context=8, width=8, depth=1, shuffle=shuffle)
        cluster(1, "thread").run(train, FIVE, settings)
    orders = [np.concatenate(seen[i : i + 2]) for i in range(0, 8, 2)]
    everything = list(range(len(windows(FIVE, settings)[0])))
    assert [order.tolist() == everything for order in orders] == [False, False, True, True]
    assert all(sorted(order) == everything for order in orders)


def experts_gradients(group, text, experts):
    settings = Settings(batch=5, context=8, width=8, depth=1, experts=experts, dropout=0.1)
    model, batch = model_of(text, settings).astype("float64"), np.array([3, 1, 4, 0, 7])
    inputs, targets = windows(text, settings)
    data_parallel_backward(group, model, inputs[batch], targets[batch], 0, 1, batch)
    return gradients(model)


@pytest.mark.parametrize("experts", [1, 3])
def test_ranks_that_split_the_batch_alone_balance_experts_as_one_device(cluster, experts):
    """The balancing loss is divided by the examples of all ranks; of one expert, one is chosen."""
    (want,) = cluster(1, "thread").run(experts_gradients, FIVE, experts)
    comparison = compare(cluster(3, "thread").run(experts_gradients, FIVE, experts), want)
    assert comparison.ok, comparison


def reconstruction_gradients(group):
    """Return the loss and the gradients of two translators on 5 pairs, by the ranks' sum."""
    data, batch = numbers(examples=9, held_out=9), np.array([3, 1, 4, 0, 7])
    settings = Settings(batch=5, width=8, depth=1, reconstruction=0.7, dropout=0.1)
    model = model_of(data, settings).astype("float64")
    inputs, targets = (array[batch] for array in windows(data, settings))
    loss = data_parallel_backward(group, model, inputs, targets, 0, 1, batch)
    return {"loss": np.array(loss), **gradients(model)}


def test_two_translators_learn_by_their_own_loss_on_any_number_of_ranks(cluster):
    (want,) = cluster(1, "thread").run(reconstruction_gradients)
    comparison = compare(cluster(3, "thread").run(reconstruction_gradients), want)
    assert comparison.ok, comparison
    data = numbers(examples=9, held_out=9)
    model = model_of(data, Settings(width=8, depth=1, reconstruction=0.7, dropout=0.1))
    model, batch = model.astype("float64"), np.array([3, 1, 4, 0, 7])
    inputs = data.train[0][batch]
    loss = model.loss(model(inputs, Randomness(0, 1, batch, 5)), model.targets(inputs))
    assert want["loss"] == pytest.approx(loss.item(), rel=1e-12)


def padded_gradients(group, targets):
    """Return the loss and the gradients of a Transformer on 5 examples, by the ranks' sum."""
    model = model_of(FIVE, Settings(context=4, width=8, depth=1)).astype("float64")
    tokens = np.random.default_rng(0).integers(0, 5, (5, 4))
    loss = data_parallel_backward(group, model, tokens, targets, 0, 0, np.arange(5))
    return {"loss": np.array(loss), **gradients(model)}


def test_padding_is_not_learned_and_counts_on_no_rank(cluster):
    """The last of 4 ranks has one target, the third none."""
    targets = np.random.default_rng(1).integers(0, 5, (5, 4))
    targets[0, 2], targets[3], targets[4, 1:] = -1, -1, -1
    (want,) = cluster(1, "thread").run(padded_gradients, targets)
    for size in (2, 4):
        comparison = compare(cluster(size, "thread").run(padded_gradients, targets), want)
        assert comparison.ok, comparison
    with pytest.raises(RankFailed, match="must be positive, not 0: it is the number of targets"):
        cluster(2, "thread").run(padded_gradients, np.full((5, 4), -1))


@pytest.mark.parametrize("dp, most", [(1, 5), (2, 3), (5, 1)])
def test_micro_batches_are_those_of_a_data_parallel_ranks_share(dp, most):
    Settings(batch=5, dp=dp, pp=2, micro_batches=most)
    message = f"each of {dp} data-parallel ranks at most {most}, too few for {most + 1} micro"
    with pytest.raises(ValueError, match=message):
        Settings(batch=5, dp=dp, pp=2, micro_batches=most + 1)
