"""What all attentions over a cut sequence promise: grouped queries, documents, bytes, memory."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd.attention import document_attention
from minidist.context_parallel import plain, tiles, zigzag
from minidist.planning.costs.layers import ring_bytes, ulysses_bytes
from tests.context_parallel.judges import attend, errors, inputs, on_one_device
from tests.strategies import cut_sequences, seeds, windows

WAYS = [("ring", 1), ("gathered", 1), ("ulysses", 1), ("ring", 2), ("gathered", 2)]
NAMES = ["ring", "gathered", "ulysses", "ring x ulysses", "gathered x ulysses"]
every = pytest.mark.parametrize("attention, U", WAYS, ids=NAMES)


def heads_of(attention, N, U, K, more):
    """Return G such that the ranks divide K G heads, and the heads of K and V that travel."""
    shared = math.lcm(K, N if attention == "ulysses" else U)
    return shared // K * more, shared


@st.composite
def sequences(draw, attention, U):
    """Draw QKV, dO, the positions of each rank, and the documents; K heads of keys, G queries."""
    held = draw(cut_sequences().filter(lambda held: len(held) % U == 0))
    B, K, D = (draw(st.integers(low, 2)) for low in (0, 1, 1))
    G, shared = heads_of(attention, len(held), U, K, draw(st.integers(1, 2)))
    qkv, grad = inputs(B, K * G, D, held, draw(seeds), draw(st.sampled_from([0.1, 1, 5])), G=G)
    return held, qkv, grad, draw(windows(held[0].length, B)), shared


@every
@settings(max_examples=12)
@given(data=st.data(), block=st.sampled_from([1, 3, 128]))
def test_outputs_gradients_and_bytes_are_as_they_should_be(cluster, attention, U, data, block):
    held, qkv, grad, documents, shared = data.draw(sequences(attention, U))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERIES", block)
        ranks = cluster(len(held), "thread")
        found = ranks.run(attend, attention, held, qkv, grad, documents, U)
    assert max(errors(found, held, qkv, grad, documents).values()) <= 1e-9
    (blocks, B, K, _, D), N = qkv.shape, len(held)
    n, kv, T = 8 * B * (blocks - 2) * K * D, 8 * B * shared * D, held[0].length
    exchange = N if attention == "ulysses" else U  # ranks that exchange heads, in a ring of groups
    heads = 2 * (exchange - 1) * (n + kv) * T // exchange
    rounds = 2 * (N // exchange - 1) * kv * T
    again = 2 if attention == "ring" else 1  # K and V go round once more for backward
    totals = tuple(map(sum, zip(*(sent for _, _, sent, _ in found), strict=True)))
    assert totals == (heads + rounds, heads + again * rounds)


def test_each_rank_sends_the_bytes_of_its_positions(cluster):
    for held in (plain(13, 4), zigzag(13, 4), plain(4, 4), plain(1, 1)):
        N, T, (qkv, grad) = len(held), held[0].length, inputs(2, 4, 3, held)
        n, sizes, sent = 8 * 2 * 4 * 3, [len(own) for own in held], {}
        for attention, formula in ("ring", ring_bytes), ("ulysses", ulysses_bytes):
            found = cluster(N, "thread").run(attend, attention, held, qkv, grad)
            sent[attention] = [moved for _, _, moved, _ in found]
            assert sent[attention] == formula(sizes, n)
        ring, ulysses = (tuple(map(sum, zip(*moved, strict=True))) for moved in sent.values())
        assert ring == (2 * (N - 1) * n * T, 4 * (N - 1) * n * T)  # K, V; once more backward
        assert ulysses == (4 * (N - 1) * n * T / N,) * 2  # four all_to_alls each way


@every
def test_a_long_sequence_over_uneven_pieces(cluster, attention, U):
    N = 3 if U == 1 else 4
    for held in (plain(301, N), zigzag(301, N)):
        qkv, grad = inputs(1, 2 * N, 4, held, G=2)
        documents = [[(0, 150), (150, 151), (151, 301)]]
        found = cluster(N, "thread").run(attend, attention, held, qkv, grad, documents, U)
        assert max(errors(found, held, qkv, grad, documents).values()) <= 1e-9


@every
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("float16", 5e-3)])
def test_every_dtype_is_as_good_as_its_rounding(cluster, device, dtype, bound, attention, U):
    N = 3 if U == 1 else 2
    for held in (zigzag(13, N), plain(140, N)):
        qkv, grad = inputs(2, 2 * N, 8, held, dtype=dtype, G=2)
        documents = [[(0, 7), (7, held[0].length)], [(0, held[0].length)]]
        ranks = cluster(N, "thread", device)
        found = ranks.run(attend, attention, held, qkv, grad, documents, U)
        assert all(y.dtype == dx.dtype == dtype for y, dx, _, _ in found)
        assert max(errors(found, held, qkv, grad, documents).values()) <= bound


@every
def test_a_document_does_not_change_when_another_one_does(cluster, attention, U):
    """To the bit, at positions on every rank; and no gradient reaches the other document."""
    held, documents = zigzag(24, 4), [[(0, 7), (7, 24)]]
    qkv, grad = inputs(1, 8, 3, held, G=2)
    other, none = qkv.copy(), grad.copy()
    other[..., :7, :] += 1
    none[..., 7:, :] = 0
    run = partial(cluster(4, "thread").run, attend, attention, held)
    before, after = run(qkv, none, documents, U), run(other, none, documents, U)
    for (y, dx, _, _), (z, _, _, _), own in zip(before, after, held, strict=True):
        later = own.indices >= 7
        assert np.array_equal(y[:, :, later], z[:, :, later])
        assert not dx[..., later, :].any()


@every
def test_what_a_rank_keeps_grows_with_the_positions_and_not_with_their_square(
    cluster, attention, U
):
    """Beyond 128 positions. Gathered, K and V of all positions are kept besides the rank's own."""
    N, H, D, G = 4, 16, 2, 4

    def kept(T):
        held = zigzag(T, N)
        qkv, grad = inputs(1, H, D, held, G=G)
        found = cluster(N, "thread").run(attend, attention, held, qkv, grad, None, U)
        return [kept for *_, kept in found]

    one, two, whole = kept(320), kept(640), 8 * 320 * (2 + 2 / G) * H * D
    assert two == [2 * nbytes for nbytes in one] and max(one) < 1.6 * whole


@given(st.data())
def test_one_device_computes_each_document_alone(data):
    B, T, K, G, D = (data.draw(st.integers(1, n)) for n in (2, 9, 2, 3, 3))
    qkv, grad = inputs(B, K * G, D, plain(T, 1), data.draw(seeds), G=G)
    documents = data.draw(windows(T, B))
    x = Tensor(qkv, requires_grad=True)
    y = document_attention(x, documents)
    y.backward(grad)
    for got, want in zip((y.data, x.grad), on_one_device(qkv, grad, documents), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
