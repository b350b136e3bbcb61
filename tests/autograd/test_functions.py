"""Values of the functions against formulas written out plainly, and what they refuse."""

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd import functions, losses
from minidist.backend import float_dtype
from minidist.rng import Randomness
from tests.strategies import arrays, host, leaf, seeds


def close(got, want, rtol=1e-12):
    np.testing.assert_allclose(host(got), want, rtol=rtol, atol=1e-14)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_multiplies_every_row(transposed, bias, place):
    x, w, b = arrays(2, 3, 4), arrays(4, 5, seed=1), arrays(5, seed=2)
    stored = np.ascontiguousarray(w.T) if transposed else w
    parameters = [place(stored), place(b)] if bias else [place(stored)]
    got = functions.linear(Tensor(place(x)), *map(Tensor, parameters), transposed=transposed)
    close(got, np.einsum("btc,cf->btf", x, w) + (b if bias else 0))


def test_relu_keeps_what_is_positive(place):
    x = np.array([[-1.0, 0.0, 2.0]])
    t = Tensor(place(x), requires_grad=True)
    y = functions.relu(t)
    close(y, [[0, 0, 2]])
    y.backward(place(np.ones((1, 3))))
    close(t.grad, [[0, 0, 1]])


def test_gelu_is_x_times_the_normal_distribution_function(place):
    x = np.linspace(-5, 5, 41)
    exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x]
    close(functions.gelu(Tensor(place(x)), "erf"), exact)
    tanh = [v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v))) for v in x]
    close(functions.gelu(Tensor(place(x))), tanh)
    np.testing.assert_allclose(tanh, exact, atol=1e-3)


@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_gelu_in_half_precision_survives_large_inputs(form):
    """x^3 would overflow in float16 at 41, and infinity times a slope of zero is no number."""
    x = Tensor(np.array([-300, -90, 90, 300], "float16"), requires_grad=True)
    y = functions.gelu(x, form)
    y.backward(np.ones(4, "float16"))
    close(y, [0, 0, 90, 300])
    close(x.grad, [0, 0, 1, 1])


def test_layer_norm_normalises_each_row(place):
    x, gain, bias = arrays(2, 3, 5), arrays(5, seed=1), arrays(5, seed=2)
    got = functions.layer_norm(*[Tensor(place(a)) for a in (x, gain, bias)], eps=0.1)
    want = np.empty_like(x)
    for row in np.ndindex(2, 3):
        variance = ((x[row] - x[row].mean()) ** 2).mean()
        want[row] = (x[row] - x[row].mean()) / math.sqrt(variance + 0.1) * gain + bias
    close(got, want)


def test_layer_norm_in_half_precision_does_not_overflow():
    x = Tensor(np.array([[-1000, 1000]], "float16"))
    gain, bias = Tensor(np.ones(2, "float16")), Tensor(np.zeros(2, "float16"))
    close(functions.layer_norm(x, gain, bias), [[-1, 1]])


@given(rows=st.integers(1, 5), count=st.integers(0, 9), seed=seeds)
def test_embedding_picks_rows_and_adds_their_gradients_up(rows, count, seed):
    indices = np.random.default_rng(seed).integers(0, rows, count)
    w, grad = leaf(rows, 3, seed=seed), arrays(count, 3, seed=seed + 1)
    y = functions.embedding(indices, w)
    y.backward(grad)
    want = np.zeros((rows, 3))
    for i, g in zip(indices, grad, strict=True):
        want[i] += g
    close(y, w.data[indices])
    close(w.grad, want)


def test_dropout_scales_what_it_keeps_and_drops_the_same_in_backward(place):
    randomness = Randomness(seed=0, step=3, examples=np.arange(50))
    x = Tensor(place(np.ones((50, 40))), requires_grad=True)
    y = functions.dropout(x, 0.25, "dropout", randomness)
    y.backward(place(np.ones((50, 40))))
    assert set(np.unique(host(y))) == {0, 1 / 0.75}
    close(x.grad, host(y))
    assert abs((host(y) > 0).mean() - 0.75) < 0.04  # four standard deviations of 2000 draws


def test_dropout_keeps_the_dtype():
    dtypes = ["float16", "float32", "float64"]
    if importlib.util.find_spec("ml_dtypes"):  # its bfloat16 times a float is float32
        dtypes.append(float_dtype("bfloat16"))
    randomness = Randomness(seed=0, step=3, examples=np.arange(5))
    for dtype in dtypes:
        x = Tensor(np.ones((5, 4), dtype), requires_grad=True)
        y = functions.dropout(x, 0.25, "dropout", randomness)
        y.backward(np.ones_like(y.data))
        assert x.dtype == y.dtype == x.grad.dtype


def test_squared_error_is_divided_by_the_reduction_size(place):
    y, t = arrays(3, 2), arrays(3, 2, seed=1)
    outputs = Tensor(place(y))
    close(losses.squared_error(outputs, place(t)), ((y - t) ** 2).mean())
    close(losses.squared_error(outputs, t), ((y - t) ** 2).mean())  # targets go where outputs are
    close(losses.squared_error(outputs, Tensor(place(t)), 4), ((y - t) ** 2).sum() / 4)


def test_squared_error_in_half_precision_adds_up_in_float32():
    y = Tensor(np.full(100, 100, "float16"), requires_grad=True)
    loss = losses.squared_error(y, np.zeros(100, "float16"))  # the sum, 1e6, is no float16
    loss.backward()
    close(loss, 1e4)
    close(y.grad, np.full(100, 2))


def test_an_empty_batch_needs_a_reduction_size():
    empty = Tensor(np.ones((0, 2)), requires_grad=True)
    with pytest.raises(ValueError, match="none of 0 targets counts"):
        losses.squared_error(empty, empty.data)
    loss = losses.squared_error(empty, empty.data, reduction_size=8)
    loss.backward()
    assert (loss.item(), empty.grad.shape) == (0, (0, 2))
