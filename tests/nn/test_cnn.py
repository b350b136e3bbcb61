"""The residual convolutional network: its layers and names, its gradients, and that it learns."""

import numpy as np

from minidist import Tensor, nn
from minidist.autograd import gradcheck
from minidist.nn.cnn import ConvBlock
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays


def model_of(widths=(3, 4), seed=0):
    return nn.CNN(2, 5, widths, seed=seed, dtype="float64")


def test_it_is_a_stem_blocks_and_a_head_with_global_names():
    model = model_of()
    assert [len(layer.parameters()) for layer in model.layers] == [5, 10, 15, 2]
    conv_norm = ["conv.weight", *(f"norm.{n}" for n in ("gain", "bias", "running_mean"))]
    names = list(model.named_parameters())
    assert names[:4] == [f"stem.{name}" for name in conv_norm]
    parts = {name.split(".")[2] for name in names if name.startswith("blocks.1")}
    assert parts == {"first", "second", "skip"} and names[-2:] == ["head.weight", "head.bias"]


def test_images_halve_where_channels_change_and_become_one_row_of_logits():
    images, seen = Tensor(arrays(3, 2, 8, 8)), []
    x = images
    for layer in model_of((3, 4, 4, 5)).layers:
        x = layer(x)
        seen.append(x.shape)
    large, small = (3, 3, 8, 8), (3, 4, 4, 4)
    assert seen == [large, large, small, small, (3, 5, 2, 2), (3, 5)]


def test_without_the_second_norms_gain_a_block_is_relu_of_its_input():
    block, x = ConvBlock(3, 3, dtype="float64"), arrays(4, 3, 4, 4)
    block.second.norm.gain.data[...] = 0
    np.testing.assert_array_equal(block(Tensor(x)).data, np.maximum(x, 0))


def test_its_gradients_are_differences():
    model, x, targets = model_of(), arrays(3, 2, 4, 4), np.array([0, 4, 2])
    gradcheck(lambda x: model(x), x)
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))
