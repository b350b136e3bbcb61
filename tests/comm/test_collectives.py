"""The algorithms on send and recv: right, exact to the byte, and the same bits everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.collectives import ALGORITHMS
from minidist.errors import RankFailed
from minidist.pieces import split_ends, split_sizes
from minidist.planning.costs.collectives import all_reduce_bytes
from tests import causes
from tests.strategies import arrays, seeds

algorithms = st.sampled_from([*ALGORITHMS, None])


def fits(algorithm, size):
    return algorithm != "halving_doubling" or size & (size - 1) == 0


def reduce(group, algorithm, shape, seed, op, whole):
    x = arrays(*shape, seed=[seed, group.rank])
    x = np.round(10 * x) if whole else x
    before = x.copy()
    result = group.all_reduce(x, op=op, algorithm=algorithm)
    assert np.array_equal(x, before) and not np.may_share_memory(x, result)
    return result, group.ledger.total


def assert_right(cluster, algorithm, size, shape, seed, op):
    """Whole numbers must come out exactly; others nearly, with the same bits on every rank."""
    combine = {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op]
    for whole in (True, False):
        work = algorithm, shape, seed, op, whole and op != "prod"
        found = cluster(size, "thread").run(reduce, *work)
        inputs = [arrays(*shape, seed=[seed, r]) for r in range(size)]
        inputs = [np.round(10 * x) for x in inputs] if work[-1] else inputs
        want = inputs[0]
        for x in inputs[1:]:
            want = combine(want, x)
        said = causes.of_sums(inputs, [result for result, _ in found]) if op == "sum" else None
        assert said is None, f"all_reduce, {algorithm or 'in shared memory'}, {size} ranks: {said}"
        assert len({result.tobytes() for result, _ in found}) == 1
        if work[-1] or op == "max":
            np.testing.assert_array_equal(found[0][0], want, strict=True)
        else:
            np.testing.assert_allclose(found[0][0], want, rtol=1e-12, atol=1e-12, strict=True)
        n = int(np.prod(shape))
        moved, formula = [n for _, n in found], all_reduce_bytes(algorithm, n, 8, size)
        assert moved == formula, causes.of_bytes_moved(moved, formula, "all_reduce")


@given(
    algorithm=algorithms,
    size=st.integers(1, 8),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    seed=seeds,
    op=st.sampled_from(["sum", "max", "prod"]),
)
def test_every_algorithm_on_threads(cluster, algorithm, size, shape, seed, op):
    if fits(algorithm, size):
        assert_right(cluster, algorithm, size, shape, seed, op)


def test_halving_and_doubling_needs_a_power_of_two(cluster):
    with pytest.raises(RankFailed, match="power of two, not 3 ranks; use 'ring' or 'tree'"):
        cluster(3, "thread").run(lambda group: group.all_reduce(1, algorithm="halving_doubling"))


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, None])
@pytest.mark.parametrize("N", [1, 2, 4, 8])
def test_where_the_ranks_divide_the_elements_the_closed_forms_are_the_textbooks(algorithm, N):
    moved = all_reduce_bytes(algorithm, 64, 4, N)
    assert sum(moved) == 2 * (N - 1) * 64 * 4
    if algorithm != "tree":
        assert moved == [2 * (N - 1) * 64 * 4 // N] * N
    else:
        assert max(moved) == moved[0] == (N - 1).bit_length() * 64 * 4


@pytest.mark.parametrize("parts", range(1, 6))
@pytest.mark.parametrize("n", range(12))
def test_pieces_differ_by_at_most_one_larger_first(n, parts):
    sizes = split_sizes(n, parts)
    assert sum(sizes) == n and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert split_ends(n, parts) == [sum(sizes[:p]) for p in range(parts + 1)]
    assert sizes == [len(piece) for piece in np.array_split(np.arange(n), parts)]
