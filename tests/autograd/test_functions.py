"""Values of the functions against formulas written out plainly, also where logits are extreme."""

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import functions, losses
from minidist.autograd.attention import causal_attention
from minidist.autograd.functions import log_softmax, softmax
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


every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])


def plain_softmax(row):
    powers = [math.exp(v) for v in row]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_is_exp_over_its_sum(axis, place):
    x = arrays(2, 3, 4)
    want = np.apply_along_axis(plain_softmax, axis, x)
    np.testing.assert_allclose(host(softmax(Tensor(place(x)), axis)), want, rtol=1e-12)
    got = host(log_softmax(Tensor(place(x)), axis))
    np.testing.assert_allclose(got, np.log(want), rtol=1e-12)


@every_dtype
def test_rows_that_are_far_apart_do_not_disturb_each_other(dtype, place):
    x = np.array([[1e4, 1e4], [-1e4, -1e4], [0, 0], [1e4, -1e4]], dtype)
    halves = [[0.5, 0.5]] * 3 + [[1, 0]]
    np.testing.assert_array_equal(host(softmax(Tensor(place(x)))), np.array(halves, dtype))
    got = host(log_softmax(Tensor(place(x))))
    np.testing.assert_allclose(got[:3], -math.log(2), rtol=1e-3)
    np.testing.assert_array_equal(got[3], [0, -20000])


@every_dtype
def test_cross_entropy_of_logits_of_ten_thousand_is_exact(dtype, place):
    logits = np.array([[1e4, 0, 0], [1e4, 0, 0], [-1e4, -1e4, -1e4]], dtype)
    x = Tensor(place(logits), requires_grad=True)
    loss = nn.cross_entropy(x, np.array([0, 1, 2]), reduction_size=4)
    loss.backward()
    np.testing.assert_allclose(host(loss), (0 + 1e4 + math.log(3)) / 4, rtol=1e-3)
    want = np.array([[0, 0, 0], [1, -1, 0], [1 / 3, 1 / 3, -2 / 3]]) / 4
    np.testing.assert_allclose(host(x.grad), want, rtol=1e-3)
    assert (loss.dtype, x.grad.dtype) == (np.promote_types(dtype, "float32"), dtype)


@given(classes=st.integers(1, 6), rows=st.integers(1, 5), seed=seeds)
def test_cross_entropy_is_minus_the_mean_log_probability_of_the_targets(classes, rows, seed):
    logits = arrays(rows, classes, seed=seed)
    targets = np.random.default_rng(seed).integers(0, classes, rows)
    terms = [-math.log(plain_softmax(logits[i])[t]) for i, t in enumerate(targets)]
    got = nn.cross_entropy(Tensor(logits), targets).item()
    np.testing.assert_allclose(got, sum(terms) / rows, rtol=1e-12, atol=1e-14)
    got = nn.cross_entropy(Tensor(logits), targets, reduction_size=10).item()
    np.testing.assert_allclose(got, sum(terms) / 10, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [0, 2])
def test_cross_entropy_of_a_batch_in_which_nothing_counts_needs_a_reduction_size(rows, place):
    logits = Tensor(place(np.ones((rows, 3))), requires_grad=True)
    targets = np.full(rows, nn.IGNORED)
    with pytest.raises(ValueError, match=f"none of {rows} targets counts: .* reduction_size="):
        nn.cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="must be positive, not 0: it is the number of targets"):
        nn.cross_entropy(logits, targets, nn.counted(targets))
    loss = nn.cross_entropy(logits, targets, reduction_size=5)
    loss.backward()
    assert (loss.item(), logits.grad.shape) == (0, (rows, 3))
    assert not host(logits.grad).any()


@every_dtype
@pytest.mark.parametrize("size", [None, 7])
def test_ignored_targets_have_no_loss_and_no_gradient_and_do_not_count(dtype, size, place):
    """As if their rows were not there, whatever is in them."""
    logits = arrays(2, 4, 3).astype(dtype)
    targets = np.array([[0, -1, 2, 1], [-1, -1, 1, -1]])
    counts = targets != -1
    logits[1, 1] = np.nan
    logits[0, 1] = 100, -100, 0
    few = Tensor(place(logits[counts]), requires_grad=True)
    want = nn.cross_entropy(few, targets[counts], size)
    want.backward()
    for there in (targets, place(targets)):
        x = Tensor(place(logits), requires_grad=True)
        got = nn.cross_entropy(x, there, size)
        got.backward()
        np.testing.assert_allclose(host(got), host(want), rtol=1e-3 if dtype == "float16" else 1e-6)
        np.testing.assert_array_equal(host(x.grad)[counts], host(few.grad))
        assert not host(x.grad)[~counts].any()


def test_padded_parts_add_up_if_divided_by_what_counts_in_the_whole_batch():
    logits, targets = arrays(2, 5, 3), np.array([[0, 1, 2, 1, 0], [2, -1, -1, -1, -1]])
    whole = nn.cross_entropy(Tensor(logits), targets).item()

    def added(*sizes):
        rows = zip(logits, targets, sizes, strict=True)
        return sum(nn.cross_entropy(Tensor(x), t, size).item() for x, t, size in rows)

    n = nn.counted(targets)
    assert n == 6 and added(n, n) == pytest.approx(whole, rel=1e-14)
    assert added(2 * 5, 2 * 1) != pytest.approx(whole, rel=1e-2)  # the mean of the rows' means
    assert added(targets.size, targets.size) == pytest.approx(whole * 6 / 10, rel=1e-14)


@given(seed=seeds, T=st.integers(1, 5), D=st.integers(1, 4))
def test_attention_is_a_masked_softmax_row_by_row(seed, T, D):
    q, k, v = qkv = arrays(3, 2, 2, T, D, seed=seed)
    want = np.zeros((2, 2, T, D))
    for b, h, t in np.ndindex(2, 2, T):
        scores = [q[b, h, t] @ k[b, h, s] / math.sqrt(D) for s in range(t + 1)]
        for s, p in enumerate(plain_softmax(scores)):
            want[b, h, t] += p * v[b, h, s]
    np.testing.assert_allclose(causal_attention(Tensor(qkv)).data, want, rtol=1e-9, atol=1e-12)
