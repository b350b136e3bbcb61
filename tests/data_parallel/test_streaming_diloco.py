"""Fragments in turn: in the limits it is DiLoCo to the bit; four bits; what is mixed with what."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.streaming_diloco import (
    LEVELS,
    StreamingDiLoCo,
    four_bits,
    from_four_bits,
)
from minidist.errors import RankFailed
from tests.data_parallel.test_local_sgd import adamw, batches, outside
from tests.strategies import arrays, assert_same_bits, seeds


def train(group, steps, seed=0, **streams):
    """Return the common weights, this rank's own, and the bytes that fragments have sent."""
    model = nn.MLP([4, 6, 5, 3], seed=2, dtype="float64")
    local = StreamingDiLoCo(model, group, adamw(model.parameters()), **streams)
    common, own = [], []
    for x, y, total in batches(group, steps, seed, "float64"):
        nn.cross_entropy(model(x), y, total).backward()
        local.step()
        local.zero_grad()
        common.append(local.state())
        own.append(model.state())
    local.end()
    return common, own, local.apart.ledger.total


def plain_diloco(group, steps, seed=0, **options):
    model = nn.MLP([4, 6, 5, 3], seed=2, dtype="float64")
    step = outside(model, group, **options)
    for x, y, total in batches(group, steps, seed, "float64"):
        nn.cross_entropy(model(x), y, total).backward()
        step()
        model.zero_grad()
    return model.state()


@given(seed=seeds, size=st.integers(1, 3), every=st.integers(1, 3))
def test_one_fragment_at_once_with_all_bits_is_diloco_to_the_bit(cluster, seed, size, every):
    ranks, limit = cluster(size, "thread"), {"fragments": 1, "tau": 0, "alpha": 0, "bits": None}
    found = ranks.run(partial(train, every=every, **limit), 2 * every, seed)
    right = ranks.run(partial(plain_diloco, every=every), 2 * every, seed)
    for (common, own, _), want in zip(found, right, strict=True):
        assert_same_bits(common[-1], want)
        assert_same_bits(own[-1], want)


def test_ranks_have_the_same_common_weights_and_their_own(cluster):
    found = cluster(3, "thread").run(partial(train, every=4, fragments=2, tau=1), 8)
    for common, own, _ in found[1:]:
        for step in range(8):
            assert_same_bits(common[step], found[0][0][step])
            assert any((own[step][n] != found[0][1][step][n]).any() for n in own[step])


def test_fragments_meet_in_turn_and_are_applied_tau_steps_later(cluster):
    ((common, _, _),) = cluster(1, "thread").run(partial(train, every=6, fragments=3, tau=1), 12)
    moved = [
        {n.split(".")[1] for n in now if (now[n] != before[n]).any()}
        for before, now in pairwise(common)
    ]
    when = {step + 2: layers for step, layers in enumerate(moved) if layers}
    assert when == {3: {"0"}, 5: {"1"}, 7: {"2"}, 9: {"0"}, 11: {"1"}}


@pytest.mark.parametrize("alpha, want", [(0.0, 10.0 - 2.0), (0.25, 7.75), (1.0, 7.0)])
def test_alpha_is_the_share_of_what_the_rank_has_learnt_meanwhile(cluster, alpha, want):
    """One weight, 10 at first, which each inner step lowers by 1: 8 is sent, 7 is there, x is 8."""

    class Down(optim.SGD):
        def rule(self, p, g):
            p -= 1.0

    def worker(group):
        model = nn.Linear(1, 1, bias=False, name="one", dtype="float64").flatten()
        model.weight.data[...] = 10.0
        rule = Down(model.parameters(), lr=1.0)
        local = StreamingDiLoCo(model, group, rule, 2, lr=1.0, momentum=0.0, tau=1, alpha=alpha)
        for _ in range(3):
            local.step()
        return float(model.weight.data[0, 0])

    assert cluster(2, "thread").run(worker) == [want, want]


@given(seeds, st.integers(1, 9), st.sampled_from(["float32", "float64"]))
def test_four_bits_are_the_nearest_of_fifteen_numbers(seed, n, dtype):
    x = arrays(n, seed=seed, dtype=dtype)
    x[:: max(1, n // 3)] *= 1e-3
    codes, most = four_bits(x)
    got = from_four_bits(codes, most, n)
    levels = np.array([s * level for level in LEVELS for s in (1, -1)])
    nearest = abs(levels[None] - (x / most)[:, None]).min(axis=1)
    assert codes.dtype == np.uint8 and len(codes) == (n + 1) // 2 and got.dtype == dtype
    np.testing.assert_allclose(abs(got - x) / most, nearest, rtol=1e-5, atol=1e-6)
    assert (got * x >= 0).all()


def test_four_bits_of_zeros_are_zeros_and_of_nan_nan():
    assert (from_four_bits(*four_bits(np.zeros(3)), 3) == 0).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(from_four_bits(*four_bits(np.array([1.0, np.nan, 2.0])), 3)).all()


def test_a_fragment_sends_half_a_byte_per_element(cluster):
    streams = {"every": 3, "fragments": 3, "tau": 1}
    found = cluster(4, "thread").run(partial(train, **streams), 3)
    layers = [4 * 6 + 6, 6 * 5 + 5, 5 * 3 + 3]
    assert sum(sent for *_, sent in found) == 4 * 3 * sum(-(-n // 2) + 8 for n in layers)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"fragments": 7}, "fragments are 1 to 6"),
        ({"fragments": 0}, "fragments are 1 to 6"),
        ({"fragments": 3, "tau": 3}, "tau is 0 to 2 steps"),
        ({"tau": -1}, "tau is 0 to 6 steps"),
        ({"alpha": 1.5}, "alpha is a number from 0 to 1"),
        ({"bits": 8}, "bits are 4, or None"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(cluster, wrong, words):
    with pytest.raises(RankFailed, match=words):
        cluster(1, "thread").run(partial(train, every=6, **wrong), 1)
