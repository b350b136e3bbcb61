"""Weights that travel as int8 are near what they were; their shards are what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.quantized_gather import LEVELS, dequantize, quantize
from minidist.data_parallel.zero import Zero
from tests.strategies import arrays, seeds

EXAMPLE = nn.MLP([5, 7, 3], "gelu", seed=4, dtype="float64")


@given(n=st.integers(0, 40), block=st.integers(1, 45), seed=seeds)
def test_no_number_moves_by_more_than_half_a_level_and_the_largest_of_a_block_stays(n, block, seed):
    w = arrays(n, seed=seed) * 10.0 ** np.random.default_rng(seed).integers(-9, 9, n)
    levels, scales = quantize(w, block)
    assert levels.dtype == "int8" and len(levels) == n and len(scales) == -(-n // block)
    found = dequantize(levels, scales, block)
    for k, scale in enumerate(scales):
        here = slice(k * block, min(n, (k + 1) * block))
        assert scale == abs(w[here]).max() / LEVELS
        assert (abs(found[here] - w[here]) <= scale / 2 * (1 + 1e-12)).all()
        largest = abs(w[here]).argmax()
        np.testing.assert_allclose(found[here][largest], w[here][largest], 1e-15)


def test_half_precision_has_scales_of_float32():
    """In float16 the scale of a small block would be 0, and its numbers with it."""
    w = np.full(4, 2e-7, "float16")
    levels, scales = quantize(w, 4)
    assert scales.dtype == "float32" and list(levels) == [LEVELS] * 4
    np.testing.assert_array_equal(dequantize(levels, scales, 4).astype("float16"), w)


def gathered(group, block):
    """Return the whole weights that a forward pass has used, and those that the shards have."""
    model = nn.MLP([5, 7, 3], "gelu", seed=4, dtype="float64")
    zero = Zero(model, group, 3, block=block)
    seen = []
    for k, layer in enumerate(model.layers):
        zero.copies.gatherer.need(k, then=-1)
        seen.append(layer.flat.vector.copy())
    return seen, zero.state()


@pytest.mark.parametrize("size, block", [(2, 3), (4, 100)])
def test_blocks_are_of_one_ranks_shard_and_all_ranks_compute_with_the_same(cluster, size, block):
    found = cluster(size, "thread").run(gathered, block)
    for seen, state in found:
        for name, weights in EXAMPLE.state().items():
            np.testing.assert_array_equal(state[name], weights)
        for layer, vector in zip(EXAMPLE.layers, seen, strict=True):
            pieces = np.array_split(layer.flat.vector, size)
            want = [dequantize(*quantize(piece, block), block) for piece in pieces]
            np.testing.assert_array_equal(vector, np.concatenate(want))


def test_what_rounds_weights_that_travel_does_not_add_up_over_steps(cluster):
    """After many steps of a tiny rate the shards have moved, though no level has."""

    def worker(group):
        model = nn.MLP([5, 7, 3], "gelu", seed=4, dtype="float64")
        zero = Zero(model, group, 3, block=16)
        optimizer = optim.SGD(zero.parameters(), 1e-9)
        for _ in range(4):
            loss = nn.cross_entropy(model(arrays(6, 5)), np.zeros(6, int), 6 * group.size)
            zero.accumulate(loss)
            zero.step(optimizer)
        return zero.state()

    state = cluster(2, "thread").run(worker)[0]
    moved = [abs(state[name] - w).max() for name, w in EXAMPLE.state().items()]
    assert all(0 < by < 1e-7 for by in moved)
