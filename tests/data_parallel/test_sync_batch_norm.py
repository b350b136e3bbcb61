"""Batch norms that share statistics leave one device's gradients and running statistics."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn, no_grad
from minidist.autograd import recompute
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.data_parallel.zero import Zero
from minidist.nn.datasets import Batch, shard
from minidist.pipeline_parallel import Pipeline
from minidist.verify.equivalence import check, gradients
from minidist.verify.strategies import Case
from tests.strategies import arrays, seeds


@st.composite
def normed(draw):
    """Draw (model, shape of an example): norms of images, or of rows, in float64."""
    seed = draw(st.integers(0, 99))
    if draw(st.booleans()):
        channels, widths = draw(st.integers(1, 3)), draw(st.sampled_from([(2,), (3, 4)]))
        return nn.CNN(channels, 4, widths, seed=seed, dtype="float64"), (channels, 4, 2)
    C, F, more = draw(st.integers(1, 4)), draw(st.integers(1, 5)), {"dtype": "float64"}
    layers = [
        nn.Linear(C, F, activation="gelu", name="first", seed=seed, **more),
        nn.Residual([nn.BatchNorm(F, **more)]),
        nn.Linear(F, 4, name="second", seed=seed, **more),
    ]
    return nn.Sequential(layers), (C,)


def case_of(drawn, examples, seed):
    model, shape = drawn
    labels = np.random.default_rng(seed).integers(0, 4, examples)
    return Case("drawn", model, 2 * arrays(examples, *shape, seed=seed) + 1, labels)


splits = {"size": st.integers(1, 4), "examples": st.integers(2, 9), "seed": seeds}


@settings(max_examples=12)
@given(drawn=normed(), **splits)
def test_gradients_and_running_statistics_equal_one_devices(cluster, drawn, size, examples, seed):
    case = case_of(drawn, examples, seed)
    row = check("sync_batch_norm", case, size, cluster(size, "thread"))
    assert row["ok"], row["detail"]


def statistics_of(group, x):
    """Return the running statistics of one norm after one batch, split over the ranks."""
    norm = sync_batch_norm(nn.BatchNorm(x.shape[1], momentum=1, dtype=x.dtype), group)
    norm(Tensor(x[shard(np.arange(len(x)), group.rank, group.size)]))
    return norm.running_mean.data, norm.running_var.data


@pytest.mark.parametrize("mean", [0, 1e4])
def test_single_precision_keeps_the_digits_of_a_small_variance(cluster, mean):
    """Sums in float32 would have none left: 1e8 has steps of 8."""
    x = arrays(7, 3, 4, dtype="float32") + np.float32(mean)
    rows = np.moveaxis(x.astype("float64"), 1, -1).reshape(-1, 3)
    for got, var in cluster(3, "thread").run(statistics_of, x):
        np.testing.assert_allclose(var, rows.var(axis=0, ddof=1), rtol=1e-5)
        np.testing.assert_allclose(got, rows.mean(axis=0), rtol=1e-6, atol=1e-6)


def test_ranks_together_need_two_numbers_per_channel(cluster):
    def worker(group, count):
        norm = sync_batch_norm(nn.BatchNorm(3, dtype="float64"), group)
        try:
            return norm(Tensor(arrays(count if group.rank == 1 else 0, 3))).shape
        except ValueError as error:
            return str(error)

    assert cluster(2, "thread").run(worker, 2) == [(0, 3), (2, 3)]
    for said in cluster(2, "thread").run(worker, 1):
        assert "batch norm has 1 numbers per channel" in said


def test_evaluation_sends_nothing_and_recomputation_moves_the_statistics_once(cluster):
    x = arrays(6, 3)

    def worker(group):
        norm = sync_batch_norm(nn.BatchNorm(3, dtype="float64"), group)
        mine = Tensor(x[group.rank :: 2], requires_grad=True)
        recompute(norm, mine).sum().backward()
        moved, sent = norm.running_mean.data.copy(), group.ledger.total
        with no_grad():
            norm.eval()(mine)
        return moved, sent < group.ledger.total

    for moved, sent in cluster(2, "thread").run(worker):
        np.testing.assert_allclose(moved, 0.1 * x.mean(axis=0), rtol=1e-12)
        assert not sent


@pytest.mark.parametrize(
    "strategy, remedy",
    [
        ("zero_3", r"call sync_batch_norm\(model, group\) before training"),
        ("downpour", r"use model.eval\(\) to train with fixed ones"),
        ("zb_v", "sync_batch_norm sums over ranks only"),
        ("pipedream_2bw", "sync_batch_norm sums over ranks only"),
    ],
)
def test_parts_of_a_batch_servers_and_micro_batches_are_refused_and_told_the_remedy(
    strategy, remedy
):
    case = case_of((nn.CNN(1, 4, (2,) * 7, dtype="float64"), (1, 4, 4)), 8, seed=0)
    with pytest.raises(ValueError, match=remedy):
        gradients(strategy, case.model, case.inputs, case.targets, 3, transport="thread")


@pytest.mark.parametrize(
    "make",
    [partial(Zero, stage=3), partial(Pipeline, micro_batches=2)],
)
def test_a_norm_that_trains_again_after_its_trainer_was_made_is_refused_too(cluster, make):
    def worker(group):
        layers = [nn.Linear(3, 3, name="first"), nn.BatchNorm(3), nn.Linear(3, 2, name="last")]
        model = nn.Sequential(layers).eval()
        trainer, batch = make(model, group), Batch(arrays(4, 3, dtype="float32"), np.zeros(4, int))
        trainer.backward(batch)
        for norm in trainer.model.modules(nn.BatchNorm):
            norm.train()
        with pytest.raises(ValueError, match="needs the statistics of the whole batch"):
            trainer.backward(batch)
        return len(list(trainer.model.modules(nn.BatchNorm)))

    assert sum(cluster(1 if make.func is Pipeline else 2, "thread").run(worker)) > 0
