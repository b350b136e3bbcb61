"""Softmax, attention and cross-entropy against plain formulas, also where logits are extreme."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd.attention import causal_attention
from minidist.autograd.functions import log_softmax, softmax
from tests.strategies import arrays, host, seeds

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


def test_parts_of_a_batch_add_up_to_the_loss_of_the_whole():
    logits, targets = arrays(7, 3), np.arange(7) % 3
    whole = nn.cross_entropy(Tensor(logits), targets).item()
    cuts = [slice(0, 2), slice(2, 2), slice(2, 7)]  # the middle one is empty
    parts = [nn.cross_entropy(Tensor(logits[c]), targets[c], reduction_size=7) for c in cuts]
    assert sum(part.item() for part in parts) == pytest.approx(whole, rel=1e-14)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([0, 3], "target 3 is outside the 3 classes of the logits"),
        ([0, -1], "target index -1 is negative"),
        ([0.0, 1.0], "target indices must be integers, not float64"),
        ([0, 1, 2], r"logits \[2, 3\] need targets \[2\], got \[3\]"),
    ],
)
def test_cross_entropy_refuses_wrong_targets(targets, message, place):
    with pytest.raises(ValueError, match=message):
        nn.cross_entropy(Tensor(place(arrays(2, 3))), np.array(targets))


def test_cross_entropy_of_an_empty_batch_needs_a_reduction_size():
    logits = Tensor(np.ones((0, 3)), requires_grad=True)
    with pytest.raises(ValueError, match="an empty batch needs reduction_size="):
        nn.cross_entropy(logits, np.zeros(0, int))
    loss = nn.cross_entropy(logits, np.zeros(0, int), reduction_size=5)
    loss.backward()
    assert (loss.item(), logits.grad.shape) == (0, (0, 3))


@given(seed=seeds, T=st.integers(1, 5), D=st.integers(1, 4))
def test_attention_is_a_masked_softmax_row_by_row(seed, T, D):
    q, k, v = qkv = arrays(3, 2, 2, T, D, seed=seed)
    want = np.zeros((2, 2, T, D))
    for b, h, t in np.ndindex(2, 2, T):
        scores = [q[b, h, t] @ k[b, h, s] / math.sqrt(D) for s in range(t + 1)]
        for s, p in enumerate(plain_softmax(scores)):
            want[b, h, t] += p * v[b, h, s]
    np.testing.assert_allclose(causal_attention(Tensor(qkv)).data, want, rtol=1e-9, atol=1e-12)


@every_dtype
def test_attention_with_huge_scores_picks_the_best_position(dtype, place):
    qkv = np.zeros((3, 1, 1, 3, 1), dtype)
    qkv[0], qkv[1, 0, 0, :, 0], qkv[2, 0, 0, :, 0] = 100, [-100, 100, 0], [1, 2, 3]
    x = Tensor(place(qkv), requires_grad=True)
    y = causal_attention(x)  # scores of -1e4, 1e4 and 0
    y.backward(place(np.ones(y.shape, dtype)))
    np.testing.assert_array_equal(host(y).reshape(-1), [1, 2, 2])
    np.testing.assert_array_equal(host(x.grad)[2].reshape(-1), [1, 2, 0])
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (2, 1, 2, 4, 5)])
def test_attention_takes_queries_keys_and_values_stacked(shape):
    with pytest.raises(ValueError, match=r"takes \[3, B, H, T, D\], got \[" + str(shape[0])):
        causal_attention(Tensor(arrays(*shape)))
