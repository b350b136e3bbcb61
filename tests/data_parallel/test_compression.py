"""What is sent and what is remembered add up to the gradient, exactly; k = n sends all of it."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel import naive
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK, on_grid
from minidist.data_parallel.local_sgd import DiLoCo
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.errors import RankFailed
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
@pytest.mark.parametrize("size", [1, 3])
def test_the_ranks_get_the_sum_of_what_they_sent_and_the_same_bits(cluster, name, size):
    ranks = cluster(size).run(steps_of, name, 5, "float64")
    for step in zip(*ranks, strict=True):
        for call in range(4):
            p, _, sent = step[0][2][call]
            want = sum(rank[2][call][2].own for rank in step)
            assert_same_bits(
                {r: rank[3][p] for r, rank in enumerate(step)},
                dict.fromkeys(range(size), sent.total),
            )
            np.testing.assert_allclose(sent.total, want, rtol=0, atol=1e-14 * abs(want).max())


def whole_numbers(group, steps):
    """Return {name: (sum of whole-number gradients, what arrived of it, what is owed)}."""
    model = model_of()
    feedback, random = ErrorFeedback(model, group, TopK(0.3)), np.random.default_rng(group.rank)
    given, arrived = {}, {}
    for _ in range(steps):
        for name, p in model.named_parameters().items():
            p.grad = random.integers(-9, 10, p.shape).astype("float64")
            given[name] = given.get(name, 0) + p.grad
        feedback.all_reduce_gradients()
        for name, p in model.named_parameters().items():
            arrived[name] = arrived.get(name, 0) + p.grad
        model.zero_grad()
    return {
        name: (group.all_reduce(given[name]), arrived[name], group.all_reduce(owed))
        for name, owed in feedback.errors.items()
    }


def test_over_many_steps_nothing_is_lost(cluster):
    for rank in cluster(3).run(whole_numbers, 7):
        for given_, arrived, owed in rank.values():
            assert np.array_equal(given_, arrived + owed) and owed.any()


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
@pytest.mark.parametrize("size", [1, 3])
def test_with_k_equal_n_a_training_has_the_bits_of_naive(cluster, size, dtype):
    got, want = (cluster(size).run(train, how, dtype)[-1] for how in (everything, plainly))
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


def test_sign_sends_signs_times_the_mean_size(cluster):
    v = np.array([3.0, -1.0, 0.0, -4.0])
    (sent,) = cluster(1, "thread").run(compressed, Sign(), v)
    assert sent.own.tolist() == [2, -2, 2, -2]


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


@pytest.mark.parametrize("compress", [TopK(0.5), Sign(), Int8(), PowerSGD(2)])
def test_gradients_of_zero_stay_zero(cluster, compress):
    (sent,) = cluster(1, "thread").run(compressed, compress, np.zeros((3, 4)))
    assert not sent.total.any() and not (sent.v - sent.own).any()


def test_a_grid_is_fine_and_the_same_for_all():
    x, y = wild(np.random.default_rng(0), 1000, "float64"), np.array([0.3])
    a, b = on_grid(x, y)
    most = max(abs(x).max(), 0.3)
    assert abs(a - x).max() <= 2**-50 * most
    u = Fraction(2) ** int(np.frexp(3 * most)[1] - 53)
    assert all((Fraction(n) / u).denominator == 1 for n in [*a.tolist(), *b.tolist()])


def test_a_sum_is_not_summed_again(cluster):
    def twice(group):
        model = model_of()
        feedback = ErrorFeedback(model, group, Sign())
        feedback.all_reduce_gradients()
        feedback.all_reduce_gradients()

    with pytest.raises(RankFailed, match="would be summed over them again"):
        cluster(2, "thread").run(twice)


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_is_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match="share is a number above 0 and up to 1"):
        TopK(share)


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
