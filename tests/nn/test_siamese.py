"""The siamese network: two uses of one branch, and what compares them."""

import numpy as np
import pytest
from hypothesis import given

from minidist import Tensor, nn
from minidist.autograd import gradcheck
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays, gradients, seeds


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


def test_parameters_have_global_names_and_lie_in_one_vector():
    model = nn.Siamese([6, 5, 4])
    layers = ["branch.0", "branch.1", "join"]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert list(model.named_parameters()) == names
    assert model.layers == [model] and model.flat.size == 6 * 5 + 5 + 5 * 4 + 4 + 4 * 2 + 2


@given(seed=seeds)
def test_the_order_within_a_pair_does_not_matter(seed):
    model, x = model_of(), arrays(3, 2, 6, seed=seed)
    np.testing.assert_array_equal(model(x).data, model(x[:, ::-1].copy()).data)


def test_gradients_agree_with_central_differences_also_where_two_embeddings_meet():
    model, x = model_of(), arrays(3, 2, 6)
    x[0, 1] = x[0, 0]
    gradcheck(model, x)
    targets = np.array([0, 2, 1])
    assert_gradients_are_differences(model, lambda: nn.cross_entropy(model(x), targets))


def test_both_branches_contribute_to_the_gradient_of_the_shared_weights():
    model, x = model_of(), arrays(3, 2, 6)
    parts = []
    for i in range(2):  # the other embedding held fixed
        h0, h1 = model.embed(x[:, 0]), model.embed(x[:, 1])
        logits = model.compare(h0, h1.detach()) if i == 0 else model.compare(h0.detach(), h1)
        logits.sum().backward()
        parts.append(gradients(model))
        for p in model.parameters():
            p.grad = None
    model(x).sum().backward()
    for name, grad in gradients(model).items():
        if name.startswith("branch"):
            assert min(np.abs(part[name]).max() for part in parts) > 1e-3, name
            np.testing.assert_allclose(grad, parts[0][name] + parts[1][name], rtol=1e-12)
        else:
            np.testing.assert_array_equal(grad, parts[0][name])


@pytest.mark.parametrize("shape", [(3, 6), (3, 1, 6), (3, 3, 6)])
def test_what_is_no_pair_is_an_error(shape):
    with pytest.raises(ValueError, match=r"pairs have the shape \[B, 2, \.\.\.\], not \[3, "):
        model_of()(arrays(*shape))


def test_a_branch_has_two_sizes_or_more():
    with pytest.raises(ValueError, match=r"needs an input and an output size, got \[6\]"):
        nn.Siamese([6])
