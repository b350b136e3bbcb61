"""Weights that travel as int8 are near what they were; their shards are what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.quantized_gather import LEVELS, QuantizedGather, dequantize, quantize
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.verify import equivalence
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


def test_zeros_stay_zeros_and_signs_are_kept():
    w = np.array([0.0, -0.0, 0.0, 3.0, -3.0, 1e-9, -2.0])
    found = dequantize(*quantize(w, 3), 3)
    np.testing.assert_allclose(found, [0, 0, 0, 3, -3, 0, -2], 1e-15)


def test_half_precision_has_scales_of_float32():
    """In float16 the scale of a small block would be 0, and its numbers with it."""
    w = np.full(4, 2e-7, "float16")
    levels, scales = quantize(w, 4)
    assert scales.dtype == "float32" and list(levels) == [LEVELS] * 4
    np.testing.assert_array_equal(dequantize(levels, scales, 4).astype("float16"), w)


def test_one_large_element_spoils_its_own_block_alone():
    w = arrays(256)
    w[17] = 100.0
    errors = {n: abs(dequantize(*quantize(w, n), n) - w) for n in (16, 256)}
    assert errors[256][32:].max() > 20 * errors[16][32:].max()


def gathered(group, block):
    """Return the whole weights that a forward pass has used, and those that the shards have."""
    model = nn.MLP([5, 7, 3], "gelu", seed=4, dtype="float64")
    zero = Zero(model, group, 3, block=block)
    seen = []
    for k, layer in enumerate(model.layers):
        zero.copies.gatherer.need(k, then=-1)
        seen.append(layer.flat.vector.copy())
    return seen, zero.state()


@pytest.mark.parametrize("size, block", [(1, 4), (2, 3), (3, 8), (4, 100)])
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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_precisions_train(cluster, dtype):
    def worker(group, dtype):
        model = nn.MLP([5, 7, 3], "gelu", seed=4, dtype=dtype)
        zero = Zero(model, group, 3, block=8)
        loss = nn.cross_entropy(model(arrays(6, 5).astype(dtype)), np.zeros(6, int), 12)
        zero.accumulate(loss)
        return [s.parameter.grad.astype("float64") for s in zero.shards]

    (exact, *_), (found, *_) = (cluster(2, "thread").run(worker, d) for d in ("float64", dtype))
    for want, got in zip(exact, found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-2)


@pytest.mark.parametrize(
    "stage, block, message",
    [
        (2, 64, "stage 2 gathers no weights in a pass to quantize; use stage 3"),
        (3, 0, "block is a whole number from 1, not 0"),
        (3, 2.5, "block is a whole number from 1, not 2.5"),
    ],
)
def test_wrong_blocks_are_refused(cluster, stage, block, message):
    def worker(group, stage, block):
        Zero(nn.MLP([5, 7, 3]), group, stage, block=block)

    with pytest.raises(RankFailed, match=message) as caught:
        cluster(2, "thread").run(worker, stage, block)
    assert isinstance(caught.value.__cause__, ValueError)
    if stage == 3:
        with pytest.raises(ValueError, match=message):
            QuantizedGather(block)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
def test_every_number_of_ranks_is_its_replay_to_the_bit(cluster, size):
    for case in equivalence.find("quantized_gather").cases(size):
        row = equivalence.check("quantized_gather", case, size, cluster(size, "thread"))
        assert row["ok"], row["detail"]
