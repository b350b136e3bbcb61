"""Llama's parts against their formulas, and what of them a split must keep apart."""

import numpy as np
import pytest

from minidist import Tensor, nn, run
from minidist.autograd import gradcheck
from minidist.errors import RankFailed
from minidist.nn.rotary import frequencies, rotate
from minidist.pieces import Positions
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer, sum_squares, unsplit, vocab_parallel
from tests.strategies import arrays


def small(kv_heads=2, **more):
    sizes = {"vocab": 11, "width": 16, "heads": 4, "depth": 2, "context": 8, "hidden": 24}
    return nn.Llama(**sizes, kv_heads=kv_heads, dtype="float64", **more)


@pytest.mark.filterwarnings("error")
def test_a_gate_far_from_zero_overflows_nowhere():
    x = Tensor(np.array([[-1e5, 1e5, 1.0, 1.0]], "float32"), requires_grad=True)
    y = nn.linear.ACTIVATIONS["swiglu"](x)
    y.backward(np.ones_like(y.data))
    assert y.data.tolist() == [[0, 1e5]] and np.isfinite(x.grad).all()


def test_a_pair_of_numbers_is_turned_like_a_complex_number():
    qkv = arrays(3, 2, 2, 5, 6)
    y, z = rotate(Tensor(qkv), 100.0).data, qkv[..., :3] + 1j * qkv[..., 3:]
    turned = z * np.exp(1j * np.arange(5)[:, None] * frequencies(6, 100.0))
    np.testing.assert_allclose(y[:2, ..., :3] + 1j * y[:2, ..., 3:], turned[:2])
    np.testing.assert_array_equal(y[2], qkv[2])
    gradcheck(lambda x: rotate(x, 100.0), qkv)


def test_a_piece_is_turned_by_its_positions_in_the_whole_sequence():
    qkv, held = arrays(3, 1, 2, 6, 4), Positions(((1, 2), (4, 6)), 6)
    there = Randomness(0, 0, np.arange(1), positions=held)
    got = rotate(Tensor(qkv[..., held.indices, :]), 100.0, there).data
    np.testing.assert_array_equal(got, rotate(Tensor(qkv), 100.0).data[..., held.indices, :])


def split_squares(group, kv_heads, tokens):
    """Return a split Llama's sum of squares, and the ranks' copies of keys' and values' weights."""
    model = ParallelTransformer(small(kv_heads), group)
    logits = model(tokens)
    vocab_parallel.cross_entropy(logits, tokens, group=group, vocab=11).backward()
    kv = model.layers[1].attention.kv
    return sum_squares(model, group), unsplit(kv.grad, kv, group), kv.grad


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_part_that_several_ranks_hold_counts_once(kv_heads):
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    whole = small(kv_heads)
    nn.cross_entropy(whole(tokens), tokens).backward()
    want = sum(float((p.grad**2).sum()) for p in whole.parameters())
    found = run(split_squares, 4, kv_heads, tokens, transport="thread")
    for squares, gradient, _ in found:
        assert squares == pytest.approx(want, rel=1e-12)
        kv = whole.named_parameters()["blocks.0.attention.key_value.weight"]
        np.testing.assert_allclose(gradient, kv.grad, atol=1e-12)
    for first in range(0, 4, 4 // kv_heads):  # copies learn the same, to the bit
        copies = [grad for *_, grad in found[first : first + 4 // kv_heads]]
        assert all(np.array_equal(copies[0], other) for other in copies)


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(RankFailed, match="cannot split 2 heads of keys and values over 3 ranks"):
        run(
            lambda group: ParallelTransformer(nn.Llama(11, 24, 12, 2, 1, 8), group),
            3,
            transport="thread",
        )
