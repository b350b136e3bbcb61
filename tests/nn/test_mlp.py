"""The multi-layer perceptron: values, dtypes of a whole step, deferred gradients."""

import numpy as np
import pytest
from hypothesis import given

from minidist import Tensor, nn, optim
from tests.strategies import (
    arrays,
    assert_same_bits,
    gradients,
    mlps,
    seeds,
    watch_dtypes,
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
    nn.cross_entropy(model(x), targets).backward()
    for name, p in model.named_parameters().items():
        start, direction, losses = p.data.copy(), arrays(*p.shape, seed=1), []
        for distance in (1e-6, -1e-6):
            p.data[...] = start + distance * direction
            losses.append(nn.cross_entropy(model(x), targets).item())
        p.data[...] = start
        want = (losses[0] - losses[1]) / 2e-6
        assert (p.grad * direction).sum() == pytest.approx(want, rel=1e-6, abs=1e-8), name


@given(drawn=mlps(), seed=seeds)
def test_deferred_gradients_have_the_same_bits(drawn, seed):
    model, sizes = drawn
    results = []
    for thunks in (None, []):
        for p in model.parameters():
            p.grad = None
        x = Tensor(arrays(3, sizes[0], seed=seed), requires_grad=True)
        model(x).sum().backward(deferred=thunks)
        if thunks is not None:
            assert len(thunks) == len(model.parameters())
            assert all(p.grad is None for p in model.parameters())
        complete = x.grad.copy()
        for thunk in thunks or []:
            thunk()
        np.testing.assert_array_equal(x.grad, complete)
        results.append({"x": x.grad} | gradients(model))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_training_step_keeps_its_dtype(dtype, optimizer, activation, place, device):
    model = nn.MLP([4, 8, 3], activation, dtype=dtype).to(device)
    optimizer = optimizer(model.parameters(), lr=np.float64(0.01), weight_decay=0.1)
    with watch_dtypes() as dtypes:
        logits = model(place(arrays(5, 4, dtype=dtype)))
        nn.cross_entropy(logits, np.arange(5) % 3).backward()
    assert dtypes == {np.dtype(dtype)}
    before = model.layers[0].weight.data.copy()
    norm = optimizer.clip_global_norm(0.1)
    optimizer.step()
    assert type(norm) is float if device == "cpu" else norm.dtype == "float64" and norm.ndim == 0
    for p in model.parameters():
        assert p.dtype == p.grad.dtype == p.home.vector.dtype == dtype
        assert bool(abs(p.data).max() < 10)
    assert bool((model.layers[0].weight.data != before).any())


def test_an_input_of_another_dtype_is_an_error():
    with pytest.raises(ValueError, match="Linear of float64 and float32"):
        nn.MLP([2, 2])(arrays(1, 2))


def test_an_mlp_has_two_sizes_or_more():
    with pytest.raises(ValueError, match=r"needs an input and an output size, got \[3\]"):
        nn.MLP([3])
