"""What is sent and what is remembered add up to the gradient, exactly; PowerSGD is exact where its
rank suffices, and nearer to the best of its rank from step to step.
"""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel import naive
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.local_sgd import DiLoCo
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.verify.compare import compare
from tests.strategies import assert_same_bits, seeds

COMPRESSORS = {
    "top_k": partial(TopK, 0.2),
    "sign": Sign,
    "int8": partial(Int8, 3),
    "power_sgd": partial(PowerSGD, 2),
}
every_compressor = pytest.mark.parametrize("name", COMPRESSORS)


def wild(random, shape, dtype):
    """Return numbers of both signs, from 1e-30 to 1 in size, some of them 0."""
    sizes = 10 ** random.uniform(-30, 0, shape) * random.choice(
        [0, -1, 1], shape, p=[0.1, 0.4, 0.5]
    )
    return sizes.astype(dtype)


def model_of(dtype="float64"):
    return nn.MLP([5, 7, 3], seed=1, dtype=dtype)


class Recorded:
    """A compressor that keeps what it was given and what it did: [(name, given, Sent)]."""

    def __init__(self, compress):
        self.compress, self.calls = compress, []

    def __call__(self, v, p, group, step):
        given = v.copy()
        sent = self.compress(v, p, group, step)
        self.calls.append((p.name, given, sent))
        return sent


def steps_of(group, name, seed, dtype, steps=4):
    """Return [({name: g}, {name: e}, calls, {name: total}, {name: e'})] of some steps."""
    model, random = model_of(dtype), np.random.default_rng([seed, group.rank])
    recorded = Recorded(COMPRESSORS[name]())
    feedback, found = ErrorFeedback(model, group, recorded), []
    for _ in range(steps):
        named = model.named_parameters()
        for p in named.values():
            p.grad = wild(random, p.shape, dtype)
        given, before = {n: p.grad for n, p in named.items()}, dict(feedback.errors)
        feedback.all_reduce_gradients()
        totals = {n: p.grad for n, p in named.items()}
        found.append((given, before, recorded.calls, totals, dict(feedback.errors)))
        recorded.calls = []
        model.zero_grad()
    return found


def exactly(a, b, c):
    """Return whether a + b = c as real numbers, element by element."""
    numbers = (map(Fraction, x.reshape(-1).tolist()) for x in (a, b, c))
    return all(x + y == z for x, y, z in zip(*numbers, strict=True))


@every_compressor
@settings(max_examples=5)
@given(seed=seeds, dtype=st.sampled_from(["float64", "float32", "float16"]))
def test_what_is_sent_and_what_is_remembered_are_v_without_rounding(cluster, name, seed, dtype):
    for rank in cluster(2, "thread").run(steps_of, name, seed, dtype, 3):
        for given_, before, calls, totals, after in rank:
            for p, v, sent in calls:
                assert after[p].dtype == "float64" and totals[p].dtype == dtype
                assert np.array_equal(after[p] + sent.own, sent.v)
                assert exactly(after[p], sent.own, sent.v)
                assert np.array_equal(v, given_[p].astype("float64") + before.get(p, 0.0))
                assert abs(sent.v - v).max() <= 2**-50 * max(abs(v).max(), abs(sent.own).max())
                assert name != "top_k" or np.array_equal(sent.v, v)


@every_compressor
def test_the_ranks_get_the_sum_of_what_they_sent_and_the_same_bits(cluster, name):
    ranks = cluster(3, "thread").run(steps_of, name, 5, "float64")
    for step in zip(*ranks, strict=True):
        for call in range(4):
            p, _, sent = step[0][2][call]
            want = sum(rank[2][call][2].own for rank in step)
            assert_same_bits(
                {r: rank[3][p] for r, rank in enumerate(step)},
                dict.fromkeys(range(3), sent.total),
            )
            np.testing.assert_allclose(sent.total, want, rtol=0, atol=1e-14 * abs(want).max())


def train(group, reduce, dtype, steps=5):
    model = model_of(dtype)
    random, optimizer = np.random.default_rng(group.rank), optim.SGD(model.parameters(), 0.1, 0.9)
    reduce = reduce(model, group)
    for _ in range(steps):
        x, y = random.standard_normal((4, 5)).astype(dtype), random.integers(0, 3, 4)
        nn.cross_entropy(model(x), y, 4 * group.size).backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
    return model.state()


def everything(model, group):
    return ErrorFeedback(model, group, TopK(1.0)).all_reduce_gradients


def plainly(model, group):
    return partial(naive.all_reduce_gradients, model, group)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_with_k_equal_n_a_training_has_the_bits_of_naive(cluster, dtype):
    got, want = (cluster(3, "thread").run(train, how, dtype)[-1] for how in (everything, plainly))
    assert_same_bits(got, want)


def compressed(group, compress, v):
    return compress(v, nn.Parameter(np.zeros(v.shape), "p"), group, 0)


@given(seed=seeds, n=st.integers(1, 40), share=st.floats(0.01, 1))
def test_top_k_sends_the_largest(cluster, seed, n, share):
    v = np.random.default_rng(seed).standard_normal(n)
    (sent,) = cluster(1, "thread").run(compressed, TopK(share), v)
    went = sent.own != 0
    assert went.sum() == max(1, int(share * n)) and np.array_equal(sent.own[went], v[went])
    assert went.all() or abs(v[went]).min() >= abs(v[~went]).max()


def test_int8_is_right_in_the_mean_and_never_off_by_a_level(cluster):
    v = np.random.default_rng(0).standard_normal(200)
    level, tries = abs(v).max() / 127, 400

    def offs(group):
        return [compressed(group, Int8(seed), v).own - v for seed in range(tries)]

    (found,) = cluster(1, "thread").run(offs)
    assert abs(np.array(found)).max() < level * (1 + 1e-12)
    assert abs(np.mean(found, axis=0)).max() < 5 * level / 2 / np.sqrt(tries)
    assert np.std(found) > level / 4


def test_int8_draws_by_seed_step_rank_and_name_alone(cluster):
    def drawn(group, seed, step, name):
        v = np.linspace(-1, 1, 99)
        return Int8(seed)(v, nn.Parameter(np.zeros(99), name), group, step).own

    run = cluster(2, "thread").run
    first, other = run(drawn, 0, 0, "p")
    assert np.array_equal(first, run(drawn, 0, 0, "p")[0])
    different = [other, *(run(drawn, *x)[0] for x in ((1, 0, "p"), (0, 1, "p"), (0, 0, "q")))]
    assert not any(np.array_equal(first, x) for x in different)


def test_shares_and_ranks_that_mean_nothing_are_refused():
    for share in (0, -1, 1.5):
        with pytest.raises(ValueError, match="share is a number above 0 and up to 1"):
            TopK(share)
    for rank in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="the rank of an approximation is 1 or more, not "):
            PowerSGD(rank)


def test_what_changes_the_weights_in_place_between_steps_takes_no_memory(cluster):
    """Compression inside of pairs, DiLoCo across them: its outer steps are no loads."""

    def worker(group):
        inside, across = group.split(group.rank // 2), group.split(group.rank % 2)
        model = nn.MLP([4, 8, 3], dtype="float64", seed=1).flatten()
        feedback = ErrorFeedback(model, inside, TopK(0.1))
        diloco = DiLoCo(model, across, optim.SGD(model.parameters(), lr=0.1), every=2, lr=0.7)
        x, y = np.random.default_rng(group.rank).normal(size=(5, 4)), np.arange(5) % 3
        for _ in range(5):
            diloco.zero_grad()
            nn.cross_entropy(model(x), y).backward()
            feedback.all_reduce_gradients()
            diloco.step()
        return feedback.steps

    assert cluster(4, "thread").run(worker) == [5] * 4


sides = st.integers(1, 9)


def approximated(group, rank, parts, steps=1):
    """Return the sum of the ranks' matrices as rank 0 .. gets it, and what they leave out."""
    compress, v = PowerSGD(rank), parts[group.rank]
    p = nn.Parameter(np.zeros(v.shape), "p")
    for step in range(steps):
        sent = compress(v, p, group, step)
    return sent.total, group.all_reduce(sent.v - sent.own)


def matrices(seed, ranks, n, m, rank):
    """Return one matrix per rank, all of full rank; their sum has at most the given rank."""
    random = np.random.default_rng(seed)
    parts = random.standard_normal((ranks, n, m))
    whole = random.standard_normal((n, rank)) @ random.standard_normal((rank, m))
    parts[-1] = whole - parts[:-1].sum(axis=0)
    return parts, whole


@given(seed=seeds, n=sides, m=sides, rank=st.integers(1, 9), more=st.integers(0, 2))
def test_at_the_rank_of_the_sum_nothing_is_lost(cluster, seed, n, m, rank, more):
    parts, whole = matrices(seed, 2, n, m, rank)
    for total, left in cluster(2, "thread").run(approximated, rank + more, parts):
        assert compare([{"p": total}], {"p": whole}).ok
        assert abs(left).max() <= 1e-9 * abs(whole).max()


@given(seed=seeds, n=sides, m=sides, rank=st.integers(1, 9), first=st.integers(0, 8))
def test_nothing_is_lost_after_a_step_of_lower_rank(cluster, seed, n, m, rank, first):
    """A warm start from a matrix of rank `first`, perhaps 0, then one of rank `rank`."""
    early, _ = matrices(seed, 2, n, m, min(first, rank - 1))
    parts, whole = matrices(seed + 1, 2, n, m, rank)

    def worker(group):
        compress, p = PowerSGD(rank), nn.Parameter(np.zeros((n, m)), "p")
        compress(early[group.rank], p, group, 0)
        return compress(parts[group.rank], p, group, 1).total

    for total in cluster(2, "thread").run(worker):
        assert compare([{"p": total}], {"p": whole}, 1e-6).ok


def test_a_warm_start_turns_towards_the_best_approximation_of_its_rank(cluster):
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((12, 12)))[0] for _ in range(2))
    whole = (left * 0.6 ** np.arange(12)) @ right
    parts = np.stack([whole / 3, 2 * whole / 3])
    best = np.sqrt((0.36 ** np.arange(3, 12)).sum())  # what the three largest do not cover
    off = [
        np.linalg.norm(cluster(2, "thread").run(approximated, 3, parts, steps)[0][0] - whole)
        for steps in (1, 3, 40)
    ]
    assert off[0] > 1.2 * best and off[0] > off[1] > off[2] and off[2] == pytest.approx(best, 1e-3)


def test_vectors_travel_as_they_are_and_higher_axes_are_columns(cluster):
    random = np.random.default_rng(0)
    vector = random.standard_normal((2, 5))
    total, left = cluster(2, "thread").run(approximated, 1, vector)[0]
    assert np.array_equal(total, vector[0] + vector[1]) and not left.any()
    cubes = random.standard_normal((2, 3, 2, 4))
    total, _ = cluster(2, "thread").run(approximated, 3, cubes)[0]
    np.testing.assert_allclose(total, cubes.sum(axis=0), atol=1e-12)
