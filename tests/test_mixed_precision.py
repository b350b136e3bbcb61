"""Mixed precision: what is divided by the scale, and what is kept in float32.

Who skips a step is in test_state_between_steps.py.
"""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.autograd.losses import scaled
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.data_parallel.zero_layers import bytes_of
from minidist.nn.datasets import Text, shard
from minidist.nn.mixture_of_experts import MixtureOfExperts
from minidist.parallel.mixed_precision import LossScale, MixedPrecision
from minidist.planning.costs.zero import BYTES, zero_bytes_held
from minidist.rng import Randomness
from minidist.training.loop import train
from minidist.training.settings import Settings
from tests.strategies import arrays, assert_same_bits, leaf

X, Y = arrays(6, 4, dtype="float16"), np.arange(6) % 3
TEXT = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")


def mlp(grad_dtype=None):
    return nn.MLP([4, 8, 3], "gelu").astype("float16", grad_dtype)


# The scale.


@given(overflows=st.lists(st.booleans(), max_size=60), every=st.integers(1, 4))
def test_the_scale_is_halved_by_an_overflow_and_doubled_after_good_steps(overflows, every):
    scale, good, want = LossScale(2.0**64, every), 0, 2.0**64
    for overflow in overflows:
        scale.update(overflow)
        good = 0 if overflow else good + 1
        want = want / 2 if overflow else want * 2 if good % every == 0 else want
        assert scale.value == want
    assert scale.skipped == sum(overflows)


def test_a_static_scale_stays_and_a_scale_that_cannot_be_halved_is_an_error():
    static = LossScale(8.0, every=None)
    for overflow in (True, False, False):
        static.update(overflow)
    assert (static.value, static.skipped) == (8.0, 1)
    with pytest.raises(ValueError, match="not finite, though the loss is not scaled"):
        LossScale(1.0).update(True)


def test_a_bfloat16_gradient_whose_squares_are_beyond_float32_is_clipped(cluster):
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes")

    def worker(group):
        model = nn.MLP([1, 1]).astype("bfloat16")
        model.load_state({name: 0 * p for name, p in model.state().items()})
        optimizer = MixedPrecision(optim.SGD(model.parameters(), 1), group, LossScale(1.0, None))
        for p, g in zip(model.parameters(), (3e20, 4e20), strict=True):
            p.grad = np.full(p.shape, g, p.dtype)
        norm = optimizer.clip_global_norm(1)
        optimizer.step()
        return norm, [float(p.data.item()) for p in model.parameters()]

    ((norm, moved),) = cluster(1, "thread").run(worker)
    assert norm == pytest.approx(5e20, rel=1e-2)
    assert moved == pytest.approx([-0.6, -0.8], rel=1e-2)


# What is kept in float32.


def test_updates_that_float16_cannot_show_add_up():
    """1 - 1e-4 is 1 in float16; after 100 such steps the weight is 0.99, loaded or not."""
    model = nn.MLP([1, 1]).astype("float16")
    weight = model.parameters()[0]
    weight.data[...] = 1
    optimizer = MixedPrecision(optim.SGD(model.parameters(), 1e-4), Alone(), LossScale(2.0**10))
    for _ in range(100):
        weight.grad = np.full((1, 1), 2.0**10, "float16")
        optimizer.step()
        optimizer.zero_grad()
        model.load_state(model.state())  # which is the copies, rounded
    assert weight.data == np.float16(0.99)


class Alone:
    """A group of one rank, of which an optimizer needs no more."""

    def all_reduce(self, x, op, label):
        return x


@pytest.mark.parametrize(
    "stage, grad_dtype, g", [(0, "float32", 4), (2, "float32", 4), (3, "float16", 2)]
)
def test_a_parameter_takes_2_2_and_12_bytes_or_4_for_a_float32_gradient(
    cluster, stage, grad_dtype, g
):
    def worker(group):
        model = mlp(grad_dtype).flatten(group.empty)
        share = Zero(model, group, stage) if stage else None
        parameters = share.parameters() if stage else model.parameters()
        optimizer = MixedPrecision(optim.Adam(parameters, 0.1), group)
        mine = shard(np.arange(6), group.rank, group.size)
        loss = nn.cross_entropy(model(X[mine]), Y[mine], reduction_size=6)
        if stage:
            share.accumulate(loss)
            share.step(optimizer)
        else:
            loss.backward()
            all_reduce_gradients(model, group)
            optimizer.step()
        homes = [layer.flat for layer in model.layers]
        homes += [s.part for s in share.shards] if stage else []
        places = share.copies.buffers if stage else []
        return {
            "parameters": bytes_of([*(home.vector for home in homes), *places[1:]]),
            "gradients": bytes_of([*(home.gradient for home in homes), *places[:1]]),
            "optimizer state": bytes_of(
                [a for arrays in (optimizer.copies, *optimizer.state) for a in arrays]
            ),
        }

    sizes = [4 * 8 + 8, 8 * 3 + 3]
    for rank, held in enumerate(cluster(2, "thread").run(worker)):
        assert held == zero_bytes_held(stage, sizes, 2, rank, BYTES["mixed", 14 + g])
    assert sum(zero_bytes_held(0, sizes, 1, 0, BYTES["mixed", 16]).values()) == 16 * sum(sizes)


# What is divided by the scale.


def test_the_norm_is_that_of_the_gradient_without_its_scale(cluster):
    norms = {}
    for scale in (1.0, 2.0**10):

        def worker(group, scale=scale):
            model = mlp()
            zero = Zero(model.flatten(group.empty), group, 2)
            optimizer = MixedPrecision(optim.SGD(zero.parameters(), 1.0), group, LossScale(scale))
            mine = shard(np.arange(6), group.rank, group.size)
            loss = nn.cross_entropy(model(X[mine]), Y[mine], reduction_size=6)
            zero.accumulate(scaled(loss, scale))
            before = zero.state()
            norm = optimizer.clip_global_norm(0.125, zero.sum_squares)
            zero.step(optimizer)
            moved = [(w - before[n]).astype("float64") for n, w in zero.state().items()]
            return norm, float(np.sqrt(sum((d * d).sum() for d in moved)))

        norms[scale] = cluster(2, "thread").run(worker)
    for (want, _), (got, moved) in zip(norms[1.0], norms[2.0**10], strict=True):
        ratio = got / want
        assert ratio == pytest.approx(1, 1e-2), (
            f"{ratio:.4g} times the norm: the gradient was measured with its loss scale"
        )
        assert want > 0.125 and moved == pytest.approx(0.125, 1e-2)


def test_the_experts_balancing_loss_is_scaled_with_the_loss():
    found = {}
    for scale in (1.0, 2.0**10):
        mixture = MixtureOfExperts(8, 4, balance=1.0)
        x = leaf(2, 3, 8, dtype="float32")
        y = mixture(x, Randomness(0, 0, np.arange(2), loss_scale=scale))
        y.backward(np.zeros_like(y.data))  # only the balancing loss has a gradient
        found[scale] = mixture.gate.weight.grad.copy()
    assert np.abs(found[1.0]).max() > 0
    ratio = np.abs(found[2.0**10]).max() / np.abs(found[1.0]).max()
    assert np.array_equal(found[2.0**10], found[1.0] * 2.0**10), (
        f"{ratio / 2**10:.4g} of the balancing loss's gradient: it entered backward without the "
        "loss scale"
    )


# Training.


def trained(cluster, precision="float16", **axes):
    settings = Settings(
        steps=4, batch=6, context=8, width=16, micro_batches=2, precision=precision, **axes
    )
    return cluster(settings.ranks, "thread").run(train, TEXT, settings)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "ep": 2, "experts": 2}])
def test_every_axis_trains_in_float16_as_one_rank_does(cluster, axes):
    (want, _), *_ = trained(cluster, experts=axes.get("experts", 0))
    found = trained(cluster, **axes)
    for losses, state in found:
        np.testing.assert_allclose(losses, want, rtol=5e-3)
        assert {str(w.dtype) for w in state.values()} == {"float16"}
        assert_same_bits(state, found[0][1])


def test_bfloat16_trains_and_travels(cluster):
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes")
    (want, _), *_ = trained(cluster, "float32")
    settings = Settings(
        steps=4, batch=6, context=8, width=16, micro_batches=2, precision="bfloat16", pp=2
    )
    for losses, state in cluster(2).run(train, TEXT, settings):
        np.testing.assert_allclose(losses, want, rtol=2e-2)
        assert {str(w.dtype) for w in state.values()} == {"bfloat16"}


def test_without_ml_dtypes_an_error_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'minidist\[bfloat16\]'"):
        nn.MLP([2, 2]).astype("bfloat16")
