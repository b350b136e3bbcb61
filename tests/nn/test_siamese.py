"""The siamese network: two uses of one branch, and what compares them."""

import numpy as np

from minidist import Tensor, nn
from minidist.autograd import gradcheck
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays


def model_of(classes=3, seed=0, activation="gelu"):
    return nn.Siamese([6, 5, 4], classes, activation, seed=seed, dtype="float64")


def test_a_siamese_network_against_its_formula():
    model, x = model_of(activation="relu"), arrays(7, 2, 6)
    w0, b0, w1, b1, w, b = (p.data for p in model.parameters())

    def branch(x):
        return np.maximum(np.maximum(x @ w0 + b0, 0) @ w1 + b1, 0)

    h0, h1 = branch(x[:, 0]), branch(x[:, 1])
    for given_as in (x, Tensor(x)):
        np.testing.assert_allclose(model(given_as).data, (h0 - h1) ** 2 @ w + b, rtol=1e-12)


def test_gradients_agree_with_central_differences_also_where_two_embeddings_meet():
    model, x = model_of(), arrays(3, 2, 6)
    x[0, 1] = x[0, 0]
    gradcheck(model, x)
    targets = np.array([0, 2, 1])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))
