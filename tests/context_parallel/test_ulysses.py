"""Ulysses: whole sequences of some heads, from some positions of all heads, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd.attention import RepeatedHeads
from minidist.context_parallel import plain, ulysses, zigzag
from minidist.planning.costs.layers import ulysses_bytes
from tests.context_parallel.judges import attend, errors, inputs
from tests.strategies import arrays, cut_sequences, seeds


def run(cluster, held, qkv, grad, device="cpu"):
    return cluster(len(held), "thread", device).run(attend, ulysses.ulysses, held, qkv, grad)


@given(
    held=cut_sequences(),
    B=st.integers(0, 2),
    each=st.integers(1, 2),
    D=st.integers(1, 5),
    seed=seeds,
)
def test_outputs_gradients_and_bytes_are_as_they_should_be(cluster, held, B, each, D, seed):
    H = each * len(held)
    qkv, grad = inputs(B, H, D, held, seed)
    found = run(cluster, held, qkv, grad)
    assert max(errors(found, held, qkv, grad).values()) <= 1e-9
    n = 8 * B * H * D
    assert [sent for _, _, sent, _ in found] == ulysses_bytes([len(own) for own in held], n)


def test_the_bytes_of_all_ranks_are_four_all_to_alls_each_way():
    for held in (plain(13, 4), zigzag(13, 4), zigzag(4, 4), plain(1, 1)):
        N, T, n = len(held), held[0].length, 12
        forward, backward = map(sum, zip(*ulysses_bytes(list(map(len, held)), n), strict=True))
        assert forward == backward == 4 * (N - 1) * n * T / N


@given(G=st.integers(1, 3), K=st.integers(1, 3), s=st.integers(1, 3), seed=seeds)
def test_copies_of_a_head_share_its_queries_and_their_gradients_add_up(G, K, s, seed):
    x = arrays(G * s + 2, 2, K, 3, 2, seed=seed)
    repeat = RepeatedHeads(s)
    y = repeat.forward(x)
    assert y.shape == (G + 2, 2, K * s, 3, 2)
    heads, again = by_head(x), by_head(y)
    for h in range(K * G * s):  # every query head meets its own keys and values
        assert all(np.array_equal(a, b) for a, b in zip(heads(h), again(h), strict=True))
    grad = arrays(*y.shape, seed=seed + 1)
    got, want = (repeat.backward(grad) * x).sum(), (grad * y).sum()  # <A^T dY, x> = <dY, A x>
    np.testing.assert_allclose(got, want, 1e-9, 1e-9, err_msg="dK, dV are sums over the copies")


def by_head(qkv):
    """Return a function of h: the query, the keys and the values of head h."""
    G = len(qkv) - 2
    return lambda h: (qkv[h % G, :, h // G], qkv[-2, :, h // G], qkv[-1, :, h // G])


@given(held=cut_sequences(), seed=seeds)
def test_pieces_put_in_order_come_apart_again(held, seed):
    pieces = [arrays(2, len(own), 3, seed=[seed, r]) for r, own in enumerate(held)]
    whole = ulysses.in_order(pieces, held)
    for piece, own, again in zip(pieces, held, ulysses.by_rank(whole, held), strict=True):
        assert np.array_equal(whole[:, own.indices], piece) and np.array_equal(piece, again)


@pytest.mark.parametrize("heads, N", [(4, 3), (1, 2), (2, 4)])
def test_heads_that_do_not_divide_are_refused(cluster, heads, N):
    held = zigzag(8, N)
    with pytest.raises(Exception, match=rf"cannot give {heads} heads to {N} ranks; .* ring"):
        run(cluster, held, *inputs(1, heads, 2, held))
