"""PowerSGD: exact where its rank suffices, and nearer to the best of its rank from step to step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.data_parallel.power_sgd import PowerSGD, orthogonalize
from minidist.verify.compare import compare
from tests.strategies import seeds

sides = st.integers(1, 9)


def compressed(group, rank, parts, steps=1):
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
    for total, left in cluster(2, "thread").run(compressed, rank + more, parts):
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


@given(seed=seeds, n=sides, m=sides, rank=st.integers(1, 9), copies=st.integers(0, 2))
def test_columns_become_orthonormal_or_0_and_span_the_same(seed, n, m, rank, copies):
    p = matrices(seed, 1, n, m, min(rank, n, m))[1]
    p = np.concatenate([p, p[:, :copies], np.zeros((n, copies))], axis=1)
    q = orthogonalize(p)
    gram = q.T @ q
    kept = np.diag(gram) > 0.5
    np.testing.assert_allclose(gram, np.diag(kept.astype(float)), atol=1e-12)
    assert kept.sum() == np.linalg.matrix_rank(p, tol=1e-12 * abs(p).max())
    np.testing.assert_allclose(q @ (q.T @ p), p, atol=1e-11 * abs(p).max())


def test_a_warm_start_turns_towards_the_best_approximation_of_its_rank(cluster):
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((12, 12)))[0] for _ in range(2))
    whole = (left * 0.6 ** np.arange(12)) @ right
    parts = np.stack([whole / 3, 2 * whole / 3])
    best = np.sqrt((0.36 ** np.arange(3, 12)).sum())  # what the three largest do not cover
    off = [
        np.linalg.norm(cluster(2, "thread").run(compressed, 3, parts, steps)[0][0] - whole)
        for steps in (1, 3, 40)
    ]
    assert off[0] > 1.2 * best and off[0] > off[1] > off[2] and off[2] == pytest.approx(best, 1e-3)


def test_vectors_travel_as_they_are_and_higher_axes_are_columns(cluster):
    random = np.random.default_rng(0)
    vector = random.standard_normal((2, 5))
    total, left = cluster(2, "thread").run(compressed, 1, vector)[0]
    assert np.array_equal(total, vector[0] + vector[1]) and not left.any()
    cubes = random.standard_normal((2, 3, 2, 4))
    total, _ = cluster(2, "thread").run(compressed, 3, cubes)[0]
    np.testing.assert_allclose(total, cubes.sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1.5, "2"])
def test_a_rank_is_1_or_more(rank):
    with pytest.raises(ValueError, match="the rank of an approximation is 1 or more, not "):
        PowerSGD(rank)


def test_a_basis_that_lacks_a_column_keeps_the_others_and_has_columns_of_about_unit_length():
    p = nn.Parameter(np.zeros((400, 300)), "W")
    kept = np.random.default_rng(0).standard_normal(300)
    last = np.stack([1e-6 * kept, np.zeros(300)], axis=1)
    for step, q in enumerate((None, last)):
        basis = PowerSGD(2).begin(q, p.data, p, step)
        assert (abs(np.linalg.norm(basis, axis=0) - 1) < 0.2).all()
    assert abs(basis[:, 0] - kept / np.linalg.norm(kept)).max() < 1e-12
