"""The multi-layer perceptron: values, dtypes of a whole step, deferred gradients."""

import numpy as np
import pytest
from hypothesis import given

from minidist import Tensor, nn
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import (
    arrays,
    mlps,
    seeds,
)


@given(drawn=mlps(), seed=seeds)
def test_an_mlp_is_linear_layers_with_the_activation_between_them(drawn, seed):
    model, sizes = drawn
    kinds = [layer.activation for layer in model.layers]
    assert kinds[-1] == "identity" and len(set(kinds[:-1])) <= 1
    x = arrays(3, sizes[0], seed=seed)
    y = Tensor(x)
    for layer in model.layers:
        y = layer(y)
    np.testing.assert_array_equal(model(x).data, y.data)
    assert y.shape == (3, sizes[-1])


def test_an_mlp_against_its_formula():
    model, x = nn.MLP([3, 5, 2], dtype="float64"), arrays(4, 3)
    w0, b0, w1, b1 = (p.data for p in model.parameters())
    np.testing.assert_allclose(model(x).data, np.maximum(x @ w0 + b0, 0) @ w1 + b1, rtol=1e-12)


def test_gradients_of_a_whole_mlp_agree_with_central_differences():
    model, x, targets = nn.MLP([3, 5, 4], "gelu", dtype="float64"), arrays(2, 3), np.array([0, 3])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))


def test_an_mlp_has_two_sizes_or_more():
    with pytest.raises(ValueError, match=r"needs an input and an output size, got \[3\]"):
        nn.MLP([3])
