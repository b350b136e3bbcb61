"""The algorithms on send and recv: right, exact to the byte, and the same bits everywhere."""

import functools
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minidist.comm.collectives import ALGORITHMS
from minidist.errors import RankFailed
from minidist.pieces import split_ends, split_sizes
from minidist.planning.costs.collectives import all_reduce_bytes
from tests import causes
from tests.strategies import arrays, seeds


def reduce(group, algorithm, shape, seed, op, whole):
    x = arrays(*shape, seed=[seed, group.rank])
    x = np.round(10 * x) if whole else x
    before = x.copy()
    result = group.all_reduce(x, op=op, algorithm=algorithm)
    assert np.array_equal(x, before) and not np.may_share_memory(x, result)
    return result, group.ledger.total


@given(
    algorithm=st.sampled_from([*ALGORITHMS, None]),
    size=st.integers(1, 8),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    seed=seeds,
    op=st.sampled_from(["sum", "max", "prod"]),
)
def test_every_algorithm_on_threads(cluster, algorithm, size, shape, seed, op):
    """Whole numbers must come out exactly; others nearly, with the same bits on every rank."""
    assume(algorithm != "halving_doubling" or size & (size - 1) == 0)
    for whole in (op != "prod", False):
        found = cluster(size, "thread").run(reduce, algorithm, shape, seed, op, whole)
        inputs = [arrays(*shape, seed=[seed, r]) for r in range(size)]
        inputs = [np.round(10 * x) for x in inputs] if whole else inputs
        want = functools.reduce({"sum": np.add, "max": np.maximum, "prod": np.multiply}[op], inputs)
        said = causes.of_sums(inputs, [result for result, _ in found]) if op == "sum" else None
        assert said is None, f"all_reduce, {algorithm or 'in shared memory'}, {size} ranks: {said}"
        assert len({result.tobytes() for result, _ in found}) == 1
        if whole or op == "max":
            np.testing.assert_array_equal(found[0][0], want, strict=True)
        else:
            np.testing.assert_allclose(found[0][0], want, rtol=1e-12, atol=1e-12, strict=True)
        n = int(np.prod(shape))
        moved, formula = [n for _, n in found], all_reduce_bytes(algorithm, n, 8, size)
        assert moved == formula, causes.of_bytes_moved(moved, formula, "all_reduce")


def test_halving_and_doubling_needs_a_power_of_two(cluster):
    with pytest.raises(RankFailed, match="power of two, not 3 ranks; use 'ring' or 'tree'"):
        cluster(3, "thread").run(lambda group: group.all_reduce(1, algorithm="halving_doubling"))


def test_where_the_ranks_divide_the_elements_the_closed_forms_are_the_textbooks():
    for algorithm, N in product([*ALGORITHMS, None], [1, 2, 4, 8]):
        moved = all_reduce_bytes(algorithm, 64, 4, N)
        assert sum(moved) == 2 * (N - 1) * 64 * 4
        if algorithm != "tree":
            assert moved == [2 * (N - 1) * 64 * 4 // N] * N
        else:
            assert max(moved) == moved[0] == (N - 1).bit_length() * 64 * 4


def test_pieces_differ_by_at_most_one_larger_first():
    for n, parts in product(range(12), range(1, 6)):
        sizes = split_sizes(n, parts)
        assert sizes == [len(piece) for piece in np.array_split(np.arange(n), parts)]
        assert split_ends(n, parts) == [sum(sizes[:p]) for p in range(parts + 1)]
