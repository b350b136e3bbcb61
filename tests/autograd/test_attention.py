"""Attention in blocks equals attention in one piece; memory grows with T; padding is not seen."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import attention
from minidist.autograd.attention import (
    BlockwiseAttention,
    CausalAttention,
    causal_attention,
    padded_attention,
)
from minidist.autograd.recomputation import kept_bytes
from minidist.pieces import BLOCK, WHOLE, computed_scores, kept_scores
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


def test_a_query_in_any_block_sees_itself_and_no_later_position():
    T = 2 * BLOCK + 5
    qkv, grad = arrays(3, 1, 1, T, 2), np.zeros((1, 1, T, 2))
    for t in (0, BLOCK - 1, BLOCK, 2 * BLOCK, T - 1):
        grad[:] = 0
        grad[0, 0, t] = 1
        dq, dk, dv = forward_and_backward(BlockwiseAttention, qkv, grad)[1]
        assert not dq[0, 0, :t].any() and not dq[0, 0, t + 1 :].any()
        for d in (dk, dv):
            assert not d[0, 0, t + 1 :].any() and (t == 0 or d[0, 0, : t + 1].all())


@pytest.mark.parametrize("spread", [30, 3000])
def test_scores_beyond_the_range_of_exp_stay_finite(spread):
    qkv, grad = arrays(3, 1, 2, WHOLE + 1, 4), arrays(1, 2, WHOLE + 1, 4, seed=1)
    qkv[:2] *= spread
    want = forward_and_backward(CausalAttention, qkv, grad)
    for got, right in zip(forward_and_backward(BlockwiseAttention, qkv, grad), want, strict=True):
        assert off(got, right) < 1e-6


@pytest.mark.parametrize("shape", [(3, 0, 2, 5, 4), (3, 0, 2, 200, 4), (3, 2, 2, 0, 4)])
def test_no_examples_and_no_positions_are_fine(shape, place):
    x = Tensor(place(arrays(*shape)), requires_grad=True)
    y = causal_attention(x)
    y.backward(place(np.ones(shape[1:])))
    assert (y.shape, x.grad.shape) == (shape[1:], shape)


def test_the_form_is_chosen_by_the_number_of_positions():
    for T, form in (
        (1, CausalAttention),
        (WHOLE, CausalAttention),
        (WHOLE + 1, BlockwiseAttention),
    ):
        assert type(causal_attention(leaf(3, 1, 1, T, 2)).creator) is form


@pytest.mark.parametrize("T", [7, WHOLE, WHOLE + 1, 3 * WHOLE])
def test_what_is_kept_besides_q_k_v_and_o_is_the_closed_form(T):
    B, H, D = 2, 3, 4
    y = causal_attention(leaf(3, B, H, T, D) * 1.0)
    output = B * H * T * D if T > WHOLE else 0  # in one piece, only the next layer keeps O
    assert kept_bytes(y) == 8 * (3 * B * H * T * D + output + B * H * kept_scores(T))


def test_o_is_kept_once_by_attention_and_the_layer_after_it():
    layer, T = nn.CausalSelfAttention(6, 2, dtype="float64"), WHOLE + 3
    y = layer(leaf(1, T, 6))
    assert kept_bytes(y) == 8 * (4 * T * 6 + 2 * T)


def test_the_scores_that_are_computed_are_counted(monkeypatch):
    counted, matmul = [], attention.batched_matmul

    def counting(a, b, out=None):
        if out is None:  # Q K^T, and not P V
            counted.append(a.shape[-2] * b.shape[-1])
        return matmul(a, b, out=out)

    monkeypatch.setattr(attention, "batched_matmul", counting)
    for T in (1, WHOLE, WHOLE + 1, 500):
        counted.clear()
        causal_attention(Tensor(arrays(3, 1, 1, T, 2)))
        assert sum(counted) == computed_scores(T)


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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_padded_attention_is_as_good_as_its_rounding(dtype, place):
    held = np.arange(7) < np.array([7, 4, 0])[:, None]
    q, kv = arrays(3, 2, 5, 8).astype(dtype), arrays(2, 3, 2, 7, 8, seed=1).astype(dtype)
    grad = arrays(3, 2, 5, 8, seed=2).astype(dtype)
    want = attend_over_padding(*[x.astype("float64") for x in (q, kv)], held, grad.astype("d"))
    for mask in (held, place(held)):
        found = attend_over_padding(place(q), place(kv), mask, place(grad))
        for got, right in zip(found, want, strict=True):
            assert got.dtype == dtype
            assert off(host(got), right) < ROUNDING[dtype]
        assert not host(found[0])[2].any() and not host(found[1])[2].any()


def test_scores_of_padding_beyond_the_range_of_exp_are_finite():
    held = np.array([[True, False], [True, True]])
    q, kv = 3000 * arrays(2, 1, 2, 4), arrays(2, 2, 1, 2, 4, seed=1)
    for result in attend_over_padding(q, kv, held, np.ones_like(q)):
        assert np.isfinite(result).all()


@pytest.mark.parametrize("B, T", [(0, 3), (2, 0)])
def test_padded_attention_of_no_examples_and_of_no_queries(B, T, place):
    q, kv, held = arrays(B, 2, T, 4), arrays(2, B, 2, 3, 4), np.ones((B, 3), bool)
    o, dq, dkv = attend_over_padding(place(q), place(kv), held, place(q))
    assert (o.shape, dq.shape, dkv.shape) == (q.shape, q.shape, kv.shape)
    assert not host(dkv).any()


@pytest.mark.parametrize(
    "q, kv, held, message",
    [
        ((2, 3, 4), (2, 2, 1, 3, 4), (2, 3), r"takes \[B, H, T, D\] and .*, got \[2, 3, 4\]"),
        ((2, 1, 3, 4), (3, 2, 1, 3, 4), (2, 3), r"got \[2, 1, 3, 4\] and \[3, 2, 1, 3, 4\]"),
        ((2, 1, 3, 4), (2, 2, 1, 3, 5), (2, 3), r"and \[2, 2, 1, 3, 5\]"),
        ((2, 1, 3, 4), (2, 2, 1, 3, 4), (2, 4), r"need held \[2, 3\], got \[2, 4\]"),
    ],
)
def test_shapes_that_do_not_fit_padded_attention_are_named(q, kv, held, message):
    with pytest.raises(ValueError, match=message):
        padded_attention(Tensor(arrays(*q)), Tensor(arrays(*kv)), np.ones(held, bool))
