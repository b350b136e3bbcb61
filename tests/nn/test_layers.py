"""Linear, Embedding, Dropout and the MLP: values, starts and splits."""

import numpy as np
import pytest

from minidist import Tensor, nn, no_grad
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import (
    arrays,
)


def close(got, want):
    np.testing.assert_allclose(got.data, want, rtol=1e-12, atol=1e-14)


def test_linear_takes_tensors_and_arrays():
    layer, x = nn.Linear(3, 2, dtype="float64"), arrays(4, 3)
    layer.bias.data[:] = [1, -1]
    want = x @ layer.weight.data + [1, -1]
    close(layer(x), want)
    close(layer(Tensor(x)), want)


@pytest.mark.parametrize(("activation", "gain"), [("identity", 1), ("relu", 2), ("gelu", 2)])
def test_linear_starts_with_the_variance_that_its_activation_asks_for(activation, gain):
    weight = nn.Linear(500, 200, activation=activation, dtype="float64").weight.data
    assert weight.var() * 500 == pytest.approx(gain, rel=0.03)
    assert abs(weight.mean()) < 4 * weight.std() / np.sqrt(weight.size)


def test_embedding_rows_start_small():
    weight = nn.Embedding(300, 200, dtype="float64").weight.data
    assert weight.std() == pytest.approx(0.02, rel=0.03)


def test_dropout_is_off_in_evaluation_and_at_rate_zero():
    x = Tensor(arrays(2, 3))
    assert nn.Dropout(0.0)(x) is x
    with no_grad():
        assert nn.Dropout(0.5)(x) is x


def test_an_mlp_against_its_formula():
    model, x = nn.MLP([3, 5, 2], dtype="float64"), arrays(4, 3)
    w0, b0, w1, b1 = (p.data for p in model.parameters())
    np.testing.assert_allclose(model(x).data, np.maximum(x @ w0 + b0, 0) @ w1 + b1, rtol=1e-12)


def test_gradients_of_a_whole_mlp_agree_with_central_differences():
    model, x, targets = nn.MLP([3, 5, 4], "gelu", dtype="float64"), arrays(2, 3), np.array([0, 3])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))
