"""The multi-layer perceptron: values, dtypes of a whole step, deferred gradients."""

import numpy as np

from minidist import nn
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import (
    arrays,
)


def test_an_mlp_against_its_formula():
    model, x = nn.MLP([3, 5, 2], dtype="float64"), arrays(4, 3)
    w0, b0, w1, b1 = (p.data for p in model.parameters())
    np.testing.assert_allclose(model(x).data, np.maximum(x @ w0 + b0, 0) @ w1 + b1, rtol=1e-12)


def test_gradients_of_a_whole_mlp_agree_with_central_differences():
    model, x, targets = nn.MLP([3, 5, 4], "gelu", dtype="float64"), arrays(2, 3), np.array([0, 3])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))
