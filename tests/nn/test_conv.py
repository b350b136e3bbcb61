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


def test_a_window_of_one_pixel_is_a_linear_layer_on_every_pixel():
    layer, x = conv(3, 4, 1), arrays(2, 3, 5, 6)
    want = np.einsum("bchw,fc->bfhw", x, layer.weight.data[:, :, 0, 0])
    np.testing.assert_allclose(layer(x).data, want, rtol=1e-12)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 0}, "kernel is a whole number from 1"),
        ({"kernel": 3, "stride": 0}, "stride is a whole number from 1"),
        ({"kernel": 3, "padding": -1}, "padding is a whole number from 0"),
        ({"kernel": 3, "activation": "tanh"}, "unknown activation 'tanh'; choose one of"),
    ],
)
def test_it_refuses_sizes_that_no_convolution_has(options, message):
    with pytest.raises(ValueError, match=message):
        conv(2, 3, **options)


def test_pooling_averages_squares_or_whole_images():
    x = np.arange(32.0).reshape(1, 2, 4, 4)
    got = nn.AveragePool(2)(Tensor(x)).data
    np.testing.assert_array_equal(got[0, 0], [[2.5, 4.5], [10.5, 12.5]])
    np.testing.assert_array_equal(nn.AveragePool()(Tensor(x)).data, [[7.5, 23.5]])
    gradcheck(nn.AveragePool(2), x)
    gradcheck(nn.AveragePool(), x)


def test_pooling_refuses_images_that_it_cannot_cut():
    with pytest.raises(ValueError, match="cannot cut images of 4 x 6 into squares of 4 x 4"):
        nn.AveragePool(4)(Tensor(arrays(1, 2, 4, 6)))
