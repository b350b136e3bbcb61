"""Conv2d, average pooling and the residual convolutional network: formulas, names, gradients."""

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.autograd import gradcheck
from minidist.autograd.convolution import convolution
from minidist.nn.cnn import ConvBlock
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


def model_of(widths=(3, 4), seed=0):
    return nn.CNN(2, 5, widths, seed=seed, dtype="float64")


def test_a_network_is_a_stem_blocks_and_a_head_with_global_names():
    model = model_of()
    assert [len(layer.parameters()) for layer in model.layers] == [5, 10, 15, 2]
    conv_norm = ["conv.weight", *(f"norm.{n}" for n in ("gain", "bias", "running_mean"))]
    names = list(model.named_parameters())
    assert names[:4] == [f"stem.{name}" for name in conv_norm]
    parts = {name.split(".")[2] for name in names if name.startswith("blocks.1")}
    assert parts == {"first", "second", "skip"} and names[-2:] == ["head.weight", "head.bias"]


def test_without_the_second_norms_gain_a_block_is_relu_of_its_input():
    block, x = ConvBlock(3, 3, dtype="float64"), arrays(4, 3, 4, 4)
    block.second.norm.gain.data[...] = 0
    np.testing.assert_array_equal(block(Tensor(x)).data, np.maximum(x, 0))


def test_gradients_of_the_network_are_differences():
    model, x, targets = model_of(), arrays(3, 2, 4, 4), np.array([0, 4, 2])
    gradcheck(lambda x: model(x), x)
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))
