"""Conv2d and average pooling: their formulas, names, gradients, and what they refuse."""

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.autograd import gradcheck
from minidist.autograd.convolution import convolution
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays


def conv(*sizes, **options):
    return nn.Conv2d(*sizes, dtype="float64", **options)


def test_it_is_a_convolution_with_a_bias_and_an_activation():
    layer, x = conv(3, 4, 3, stride=2, padding=1, activation="relu"), arrays(2, 3, 5, 6)
    layer.bias.data[...] = arrays(4, seed=1)
    want = convolution(Tensor(x), layer.weight, layer.bias, stride=2, padding=1).data
    assert layer(x).shape == (2, 4, 3, 3) and (want < 0).any()
    np.testing.assert_array_equal(layer(x).data, np.maximum(want, 0))


def test_its_weight_is_drawn_by_name_with_the_variance_of_he():
    layer, other = conv(8, 64, 5, activation="relu", name="a"), conv(8, 64, 5, name="b")
    assert list(layer.named_parameters()) == ["a.weight", "a.bias"]
    assert layer.weight.shape == (64, 8, 5, 5) and (layer.bias.data == 0).all()
    assert layer.weight.data.std() == pytest.approx(np.sqrt(2 / (8 * 25)), rel=0.05)
    assert (layer.weight.data != other.weight.data).all()
    assert list(conv(8, 64, 5, bias=False).named_parameters()) == ["conv.weight"]


def test_its_gradients_are_differences():
    layer = conv(2, 3, 3, stride=2, padding=1, activation="gelu")
    gradcheck(layer, arrays(2, 2, 4, 5))
    assert_gradients_are_differences(layer, lambda: (layer(arrays(2, 2, 4, 5)) ** 2).sum())


def test_pooling_averages_squares_or_whole_images():
    x = np.arange(32.0).reshape(1, 2, 4, 4)
    got = nn.AveragePool(2)(Tensor(x)).data
    np.testing.assert_array_equal(got[0, 0], [[2.5, 4.5], [10.5, 12.5]])
    np.testing.assert_array_equal(nn.AveragePool()(Tensor(x)).data, [[7.5, 23.5]])
    gradcheck(nn.AveragePool(2), x)
    gradcheck(nn.AveragePool(), x)
