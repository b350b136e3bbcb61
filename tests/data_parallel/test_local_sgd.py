"""Rounds of one step are naive data parallelism to the bit; longer ones end in an average."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.streaming_diloco import (
    LEVELS,
    StreamingDiLoCo,
    four_bits,
    from_four_bits,
)
from minidist.errors import RankFailed
from minidist.verify.compare import compare
from tests.strategies import arrays, assert_same_bits, seeds

LR = 0.3


def batches(group, steps, seed, dtype):
    """Yield a rank's x and y, perhaps empty, and the number of targets of all ranks."""
    for step in range(steps):
        random = np.random.default_rng([seed, step])
        x, y = random.standard_normal((5, 4)).astype(dtype), random.integers(0, 3, 5)
        yield (
            np.array_split(x, group.size)[group.rank],
            np.array_split(y, group.size)[group.rank],
            5,
        )


def train(group, method, steps, seed=0, dtype="float64"):
    """Return the weights after each step."""
    model, found = nn.MLP([4, 6, 3], seed=2, dtype=dtype), []
    step = method(model, group)
    for x, y, total in batches(group, steps, seed, dtype):
        nn.cross_entropy(model(x), y, total).backward()
        step()
        model.zero_grad()
        found.append(model.state())
    return found


sgd, adamw = partial(optim.SGD, lr=LR), partial(optim.AdamW, lr=0.05)


def plainly(model, group, optimizer=sgd):
    rule = optimizer(model.parameters())

    def step():
        all_reduce_gradients(model, group)
        rule.step()

    return step


def locally(model, group, every=1):
    return LocalSGD(model, group, LR, every).step


def alone(model, group):
    """SGD of each rank on N times its part of the loss, which never meets the others."""
    return optim.SGD(model.parameters(), LR * group.size).step


def outside(model, group, every=2, **outer):
    return DiLoCo(model, group, adamw(model.parameters()), every, **outer).step


@settings(max_examples=10)
@given(seed=seeds, size=st.integers(1, 3), dtype=st.sampled_from(["float64", "float32"]))
def test_rounds_of_one_step_have_the_bits_of_naive_after_every_step(cluster, seed, size, dtype):
    ranks = cluster(size, "thread")
    got, want = (ranks.run(train, how, 4, seed, dtype) for how in (locally, plainly))
    for mine, theirs in zip(got, want, strict=True):
        for weights, right in zip(mine, theirs, strict=True):
            assert_same_bits(weights, right)


def test_a_round_ends_in_the_average_of_the_weights_of_ranks_that_trained_alone(cluster):
    every = 3
    ends = [mine[-1] for mine in cluster(3, "thread").run(train, alone, every)]
    mean = {name: np.mean([x[name] for x in ends], axis=0) for name in ends[0]}
    got = [
        mine[-1] for mine in cluster(3, "thread").run(train, partial(locally, every=every), every)
    ]
    assert compare(got, mean).ok and any((ends[0][n] != ends[1][n]).any() for n in mean)


@pytest.mark.parametrize("method", [locally, outside])
def test_ranks_are_alike_after_a_round_and_not_within_one(cluster, method):
    first, second = cluster(2, "thread").run(train, partial(method, every=2), 6)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        alike = all(np.array_equal(one[name], other[name]) for name in one)
        assert alike == (step % 2 == 1), step


def test_the_outer_step_is_nesterovs(cluster):
    """One weight, whose inner steps move it by known amounts: 1 and 3 on the two ranks."""

    class Moves(optim.SGD):
        def rule(self, p, g):
            p -= self.lr

    def worker(group):
        model = nn.Linear(1, 1, name="one", dtype="float64").flatten()
        model.weight.data[...] = 10.0
        inner = Moves(model.parameters(), lr=[1.0, 3.0][group.rank])
        local, found = DiLoCo(model, group, inner, 1, lr=0.5, momentum=0.5), []
        for _ in range(3):
            local.step()
            found.append(float(model.weight.data[0, 0]))
        return found

    x, m, want = 10.0, 0.0, []
    for _ in range(3):
        m = 0.5 * m + 2.0  # the mean of 1 and 3
        x -= 0.5 * (2.0 + 0.5 * m)
        want.append(x)
    assert cluster(2, "thread").run(worker) == [want, want]


def begin_apart(group, method):
    method(nn.MLP([2, 2], seed=group.rank), group)


# Fragments in turn.


def train_in_streams(group, steps, seed=0, **streams):
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


@settings(max_examples=8)
@given(seed=seeds, size=st.integers(1, 3), every=st.integers(1, 3))
def test_one_fragment_at_once_with_all_bits_is_diloco_to_the_bit(cluster, seed, size, every):
    ranks, limit = cluster(size, "thread"), {"fragments": 1, "tau": 0, "alpha": 0, "bits": None}
    found = ranks.run(partial(train_in_streams, every=every, **limit), 2 * every, seed)
    right = ranks.run(partial(plain_diloco, every=every), 2 * every, seed)
    for (common, own, _), want in zip(found, right, strict=True):
        assert_same_bits(common[-1], want)
        assert_same_bits(own[-1], want)


def test_ranks_have_the_same_common_weights_and_their_own(cluster):
    streams = {"every": 4, "fragments": 2, "tau": 1}
    found = cluster(3, "thread").run(partial(train_in_streams, **streams), 8)
    for common, own, _ in found[1:]:
        for step in range(8):
            assert_same_bits(common[step], found[0][0][step])
            assert any((own[step][n] != found[0][1][step][n]).any() for n in own[step])


def test_fragments_meet_in_turn_and_are_applied_tau_steps_later(cluster):
    ((common, _, _),) = cluster(1, "thread").run(
        partial(train_in_streams, every=6, fragments=3, tau=1), 12
    )
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


def test_a_fragment_sends_half_a_byte_per_element(cluster):
    streams = {"every": 3, "fragments": 3, "tau": 1}
    found = cluster(4, "thread").run(partial(train_in_streams, **streams), 3)
    layers = [4 * 6 + 6, 6 * 5 + 5, 5 * 3 + 3]
    assert sum(sent for *_, sent in found) == 4 * 3 * sum(-(-n // 2) + 8 for n in layers)


@pytest.mark.parametrize(
    "worker, message",
    [
        *((partial(begin_apart, method=m), "parameters differ") for m in (locally, outside)),
        *(
            (partial(train, method=partial(m, every=every), steps=1), "1 local step or more, not ")
            for m, every in [(locally, 0), (locally, 1.5), (outside, np.nan), (outside, "2")]
        ),
        *(
            (partial(train, method=partial(outside, **wrong), steps=1), "must be a")
            for wrong in [{"lr": -1}, {"lr": np.nan}, {"momentum": 1}]
        ),
        *(
            (partial(train_in_streams, steps=1, every=6, **wrong), message)
            for wrong, message in [
                ({"fragments": 7}, "fragments are 1 to 6"),
                ({"fragments": 3, "tau": 3}, "tau is 0 to 2 steps"),
                ({"tau": -1}, "tau is 0 to 6 steps"),
                ({"alpha": 1.5}, "alpha is a number from 0 to 1"),
                ({"bits": 8}, "bits are 4, or None"),
            ]
        ),
    ],
)
def test_what_cannot_be_is_refused(cluster, worker, message):
    with pytest.raises(RankFailed, match=message):
        cluster(2, "thread").run(worker)
