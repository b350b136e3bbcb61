"""Batch normalisation: its formula, its gradients, and the statistics that it keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn, no_grad
from minidist.autograd import batch_norm, gradcheck, recompute
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays, host, seeds, shapes


def norm_of(channels, **options):
    layer = nn.BatchNorm(channels, **{"dtype": "float64", **options})
    layer.gain.data[...] = arrays(channels, seed=7)
    layer.bias.data[...] = arrays(channels, seed=8)
    return layer


def by_formula(x, gain, bias, eps):
    rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    mean, var = rows.mean(axis=0), rows.var(axis=0)
    y = (np.moveaxis(x, 1, -1) - mean) / np.sqrt(var + eps) * gain + bias
    return np.moveaxis(y, -1, 1), mean, rows.var(axis=0, ddof=1)


@given(B=st.integers(2, 5), C=st.integers(1, 4), rest=shapes(max_axes=2), seed=seeds)
def test_every_channel_gets_mean_0_and_variance_1_before_gain_and_bias(B, C, rest, seed):
    layer, x = norm_of(C, eps=0.1), arrays(B, C, *rest, seed=seed) + 3
    want, mean, var = by_formula(x, layer.gain.data, layer.bias.data, 0.1)
    np.testing.assert_allclose(layer(Tensor(x)).data, want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(layer.running_mean.data, 0.1 * mean, rtol=1e-12)
    np.testing.assert_allclose(layer.running_var.data, 0.9 + 0.1 * var, rtol=1e-12)


def test_it_runs_on_every_device(device, place):
    layer, x = norm_of(3).to(device), arrays(4, 3, 2, 2)
    want, _, var = by_formula(x, host(layer.gain.data), host(layer.bias.data), 1e-5)
    y = layer(Tensor(place(x)))
    y.backward(place(arrays(*x.shape, seed=1)))
    np.testing.assert_allclose(host(y), want, rtol=1e-12)
    np.testing.assert_allclose(host(layer.running_var), 0.9 + 0.1 * var, rtol=1e-12)


def test_its_gradients_are_differences_in_training_and_in_evaluation():
    layer, x = norm_of(3), arrays(4, 3, 2, 2)
    for training in (True, False):
        layer.train(training)
        gradcheck(layer, x)
        assert_gradients_are_differences(layer, lambda: (layer(Tensor(x)) ** 2).sum())


def test_evaluation_uses_the_running_statistics_and_moves_nothing():
    layer, x = norm_of(3), arrays(4, 3, 2, 2)
    layer(Tensor(x))
    before = layer.state()
    y = layer.eval()(Tensor(x[:1])).data
    mean, var = (before[f"norm.running_{what}"][:, None, None] for what in ("mean", "var"))
    gain, bias = (before[f"norm.{what}"][:, None, None] for what in ("gain", "bias"))
    np.testing.assert_allclose(y, (x[:1] - mean) / np.sqrt(var + 1e-5) * gain + bias, rtol=1e-12)
    for name, array in layer.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_statistics_move_once_where_a_pass_is_computed_again_and_not_without_recording():
    layer, once, x = norm_of(2), norm_of(2), Tensor(arrays(4, 2), requires_grad=True)
    once(x)
    recompute(layer, x).sum().backward()
    np.testing.assert_array_equal(layer.running_mean.data, once.running_mean.data)
    with no_grad():
        layer(x)
    np.testing.assert_array_equal(layer.running_mean.data, once.running_mean.data)


def test_the_running_statistics_belong_to_the_state_and_to_no_optimizer():
    layer = nn.BatchNorm(3, name="a")
    names = ["a.gain", "a.bias", "a.running_mean", "a.running_var"]
    assert list(layer.state()) == names
    assert [p.requires_grad for p in layer.parameters()] == [True, True, False, False]
    assert layer.flatten().flat.size == 6
    other = nn.BatchNorm(3, name="a")
    layer(Tensor(arrays(4, 3, dtype="float32")))
    other.load_state(layer.state())
    np.testing.assert_array_equal(other.running_var.data, layer.running_var.data)


@pytest.mark.parametrize("mean", [0, 1e4])
def test_single_precision_keeps_the_digits_of_a_small_variance(mean):
    """Squares about 0 minus the squared mean would have none: 1e8 in float32 has steps of 8."""
    x = arrays(64, 3, 4, dtype="float32") + np.float32(mean)
    rows = np.moveaxis(x.astype("float64"), 1, -1).reshape(-1, 3)
    layer = nn.BatchNorm(3, momentum=1)
    layer(Tensor(x))
    np.testing.assert_allclose(layer.running_var.data, rows.var(axis=0, ddof=1), rtol=1e-5)
    function = batch_norm.BatchNorm(sum_over_ranks=lambda sums: sums)
    function(x, layer.gain, layer.bias)
    np.testing.assert_allclose(function.var, rows.var(axis=0), rtol=1e-5)
