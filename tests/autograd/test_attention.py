"""Attention in blocks of positions equals attention in one piece, and its memory grows with T."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import attention
from minidist.autograd.attention import (
    BLOCK,
    WHOLE,
    BlockwiseAttention,
    CausalAttention,
    causal_attention,
    computed_scores,
    kept_scores,
)
from minidist.tools.activations import kept_bytes
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
