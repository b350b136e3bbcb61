"""Attention in blocks equals attention in one piece; memory grows with T; padding is not seen."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd.attention import (
    BlockwiseAttention,
    CausalAttention,
    causal_attention,
    padded_attention,
)
from minidist.pieces import BLOCK, WHOLE
from tests.strategies import arrays, host, leaf, seeds

FORMS = {"in one piece": CausalAttention, "in blocks": BlockwiseAttention}
ROUNDING = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3}
lengths = st.one_of(
    st.integers(1, 5), st.integers(BLOCK - 1, BLOCK + 1), st.integers(1, 2 * BLOCK + 2)
)


def forward_and_backward(form, qkv, grad):
    """Return (O, dQKV) of a form of attention."""
    qkv = Tensor(qkv, requires_grad=True)
    y = form()(qkv)
    y.backward(grad)
    return y.data, qkv.grad


def off(got, want):
    """Return the largest error, in parts of the largest number."""
    return np.abs(got.astype("float64") - want).max() / np.abs(want).max()


@given(
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    T=lengths,
    D=st.integers(1, 9),
    seed=seeds,
    spread=st.sampled_from([0.1, 1, 5]),
)
@example(B=1, H=1, T=1, D=1, seed=0, spread=1)
@example(B=2, H=1, T=BLOCK, D=3, seed=0, spread=1)
@example(B=1, H=2, T=2 * BLOCK + 1, D=3, seed=0, spread=1)
def test_blocks_give_what_one_piece_gives(B, H, T, D, seed, spread):
    qkv, grad = spread * arrays(3, B, H, T, D, seed=seed), arrays(B, H, T, D, seed=seed + 1)
    want = forward_and_backward(CausalAttention, qkv, grad)
    for got, right in zip(forward_and_backward(BlockwiseAttention, qkv, grad), want, strict=True):
        assert off(got, right) < 1e-9


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, BLOCK, WHOLE + 2])
def test_every_dtype_is_as_good_as_its_rounding(form, T, dtype, place):
    qkv, grad = arrays(3, 2, 3, T, 8).astype(dtype), arrays(2, 3, T, 8, seed=1).astype(dtype)
    want = forward_and_backward(CausalAttention, qkv.astype("float64"), grad.astype("float64"))
    found = forward_and_backward(FORMS[form], place(qkv), place(grad))
    for got, right in zip(found, want, strict=True):
        assert got.dtype == dtype
        assert off(host(got), right) < ROUNDING[dtype]


@pytest.mark.parametrize("spread", [30, 3000])
def test_scores_beyond_the_range_of_exp_stay_finite(spread):
    qkv, grad = arrays(3, 1, 2, WHOLE + 1, 4), arrays(1, 2, WHOLE + 1, 4, seed=1)
    qkv[:2] *= spread
    want = forward_and_backward(CausalAttention, qkv, grad)
    for got, right in zip(forward_and_backward(BlockwiseAttention, qkv, grad), want, strict=True):
        assert off(got, right) < 1e-6


def peak_bytes(T):
    """Return the peak of memory of a forward and backward pass, without the inputs."""
    qkv, grad = leaf(3, 1, 2, T, 4), arrays(1, 2, T, 4)
    tracemalloc.start()
    causal_attention(qkv).backward(grad)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_grows_with_t_and_not_with_its_square():
    some, twice = peak_bytes(1024), peak_bytes(2048)
    assert twice < 2.1 * some
    assert twice < 2 * 2048 * 2048 * 8 / 4  # a quarter of one array of all scores


def softmax_of_the_held(q, kv, held):
    """Return O and P of padded attention, example by example, over the keys that are held alone."""
    (B, H, T, D), S = q.shape, kv.shape[3]
    o, p = np.zeros((B, H, T, D)), np.zeros((B, H, T, S))
    for b in range(B):
        k, v = kv[:, b, :, held[b]].transpose(1, 2, 0, 3)  # [H, s, D] each
        scores = np.exp(np.einsum("htd,hsd->hts", q[b], k) / np.sqrt(D))
        p[b][..., held[b]] = scores / scores.sum(axis=-1, keepdims=True)
        o[b] = np.einsum("hts,hsd->htd", p[b][..., held[b]], v)
    return o, p


def attend_over_padding(q, kv, held, grad):
    """Return (O, dQ, dKV) of padded attention."""
    q, kv = Tensor(q, requires_grad=True), Tensor(kv, requires_grad=True)
    y = padded_attention(q, kv, held)
    y.backward(grad)
    return y.data, q.grad, kv.grad


@st.composite
def paddings(draw, B, S):
    """Draw held[B, S]: any keys, none of an example among them."""
    return np.array(draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S))).reshape(B, S)


@given(
    data=st.data(),
    sides=st.tuples(*[st.integers(1, most) for most in (3, 3, 5, 6, 4)]),
    seed=seeds,
    spread=st.sampled_from([0.1, 1, 5]),
)
def test_hidden_keys_are_as_if_they_were_not_there(data, sides, seed, spread):
    B, H, T, S, D = sides
    held = data.draw(paddings(B, S))
    q, kv = spread * arrays(B, H, T, D, seed=seed), spread * arrays(2, B, H, S, D, seed=seed + 1)
    grad = arrays(B, H, T, D, seed=seed + 2)
    o, dq, dkv = attend_over_padding(q, kv, held, grad)
    want, p = softmax_of_the_held(q, kv, held)
    np.testing.assert_allclose(o, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dkv[1], np.einsum("bhts,bhtd->bhsd", p, grad), rtol=1e-9, atol=1e-12)
    assert not dkv.transpose(1, 3, 0, 2, 4)[~held].any()
    none = ~held.any(axis=1)
    assert not o[none].any() and not dq[none].any()


@given(data=st.data(), seed=seeds)
def test_what_a_hidden_key_holds_changes_no_bit(data, seed):
    B, H, T, S, D = 2, 2, 3, 4, 3
    held = data.draw(paddings(B, S))
    q, kv = arrays(B, H, T, D, seed=seed), arrays(2, B, H, S, D, seed=seed + 1)
    other = kv.copy()
    other.transpose(1, 3, 0, 2, 4)[~held] = 1e3
    runs = [attend_over_padding(q, each, held, np.ones_like(q)) for each in (kv, other)]
    for got, want in zip(*runs, strict=True):
        np.testing.assert_array_equal(got, want)
