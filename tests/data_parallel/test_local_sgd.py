"""Rounds of one step are naive data parallelism to the bit; longer ones end in an average."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.errors import RankFailed
from minidist.verify.compare import compare
from tests.strategies import assert_same_bits, seeds

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


@given(seed=seeds, size=st.integers(1, 3), dtype=st.sampled_from(["float64", "float32"]))
def test_rounds_of_one_step_have_the_bits_of_naive_after_every_step(cluster, seed, size, dtype):
    ranks = cluster(size, "thread")
    got, want = (ranks.run(train, how, 4, seed, dtype) for how in (locally, plainly))
    for mine, theirs in zip(got, want, strict=True):
        for weights, right in zip(mine, theirs, strict=True):
            assert_same_bits(weights, right)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_round_ends_in_the_average_of_the_weights_of_ranks_that_trained_alone(cluster, every):
    ends = [mine[-1] for mine in cluster(3).run(train, alone, every)]
    mean = {name: np.mean([x[name] for x in ends], axis=0) for name in ends[0]}
    got = [mine[-1] for mine in cluster(3).run(train, partial(locally, every=every), every)]
    assert compare(got, mean).ok and any((ends[0][n] != ends[1][n]).any() for n in mean)


@pytest.mark.parametrize("method", [locally, outside])
def test_ranks_are_alike_after_a_round_and_not_within_one(cluster, method):
    first, second = cluster(2).run(train, partial(method, every=2), 6)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        alike = all(np.array_equal(one[name], other[name]) for name in one)
        assert alike == (step % 2 == 1), step


def test_diloco_with_one_rank_a_full_step_and_no_momentum_is_its_inner_optimizer(cluster):
    how = partial(outside, every=2, lr=1.0, momentum=0.0)
    (got,) = cluster(1).run(train, how, 6)
    (want,) = cluster(1).run(train, partial(plainly, optimizer=adamw), 6)
    assert compare([got[-1]], want[-1]).ok


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


@pytest.mark.parametrize("method", [locally, outside])
@pytest.mark.parametrize("every", [0, 1.5, np.nan, "2"])
def test_a_round_has_a_whole_number_of_steps(cluster, method, every):
    with pytest.raises(RankFailed, match="a round has 1 local step or more, not "):
        cluster(1, "thread").run(train, partial(method, every=every), 1)


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"lr": np.nan}, {"momentum": 1}])
def test_the_outer_step_has_the_settings_of_an_optimizer(cluster, wrong):
    (name,) = wrong
    with pytest.raises(RankFailed, match=f"{name} must be a"):
        cluster(1, "thread").run(train, partial(outside, **wrong), 1)


@pytest.mark.parametrize("method", [locally, outside])
def test_ranks_that_begin_with_different_weights_are_refused(cluster, method):
    def worker(group):
        method(nn.MLP([2, 2], seed=group.rank), group)

    with pytest.raises(RankFailed, match="parameters differ between ranks"):
        cluster(2, "thread").run(worker)
