"""Residual layers: the sum, its gradient, and that a skip never leaves its layer."""

import numpy as np

from minidist import nn
from minidist.autograd import gradcheck
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays


def linear(c_in, c_out, name, activation="gelu"):
    return nn.Linear(c_in, c_out, activation=activation, name=name, dtype="float64")


def model_of(depth=3, seed=0):
    return nn.ResidualMLP(6, 5, depth, 4, seed=seed, dtype="float64")


def test_a_residual_layer_adds_its_input_to_what_its_layers_give():
    first, second = linear(4, 7, "first"), linear(7, 4, "second", "identity")
    x = arrays(3, 4)
    np.testing.assert_array_equal(
        nn.Residual([first, second])(x).data, x + second(first(x)).data, strict=True
    )


def test_gradients_agree_with_central_differences():
    layer = nn.Residual([linear(4, 7, "first"), linear(7, 4, "second")])
    gradcheck(layer, arrays(2, 4))
    assert_gradients_are_differences(layer, lambda: (layer(arrays(2, 4)) ** 2).sum())
    model, x, targets = model_of(), arrays(3, 6), np.array([0, 3, 1])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))


def test_the_network_against_its_formula():
    model, x = model_of(depth=1), arrays(3, 6)
    w0, b0, w1, b1, w2, b2, w3, b3 = (p.data for p in model.parameters())
    stem = np.maximum(x @ w0 + b0, 0)
    want = (stem + np.maximum(stem @ w1 + b1, 0) @ w2 + b2) @ w3 + b3
    np.testing.assert_allclose(model(x).data, want, rtol=1e-12)
