"""Collectives as functions: each backward is the adjoint of its forward, on real ranks.

What a function takes and gives is one value that several arrays stand for. An inner product of two
such values is the sum over the ranks, except where all ranks hold the same: there it counts once.
"""

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor
from minidist.errors import RankFailed
from minidist.parallel import collective_functions as cf
from minidist.pieces import split_ends, split_sizes
from tests.strategies import arrays, seeds

both = pytest.mark.parametrize("transport", ["process", "thread"])

# name: whether its input, and its output, are the same on all ranks; what its backward calls
LAYOUTS = {
    "copy_to": (True, False, {"all_reduce"}),
    "reduce_from": (False, True, set()),
    "scatter": (True, False, {"all_gather"}),
    "gather": (False, True, set()),
    "all_gather": (False, False, {"reduce_scatter"}),
    "reduce_scatter": (False, False, {"all_gather"}),
    "all_to_all": (False, False, {"all_to_all"}),
}
TAKES_PARTS = ("gather", "all_gather", "all_to_all")  # along an axis: as equal as can be


def call(name, x, group, axis, other):
    if name in ("copy_to", "reduce_from"):
        return getattr(cf, name)(x, group)
    if name == "all_to_all":
        return cf.all_to_all(x, group, cut=other, joined=axis)
    return getattr(cf, name)(x, group, axis)


def one_product(group, a, b, replicated):
    """Return <a, b> over all ranks, on all of them; what all ranks hold counts once.

    What they should all hold, and do not, has no inner product.
    """
    if replicated:
        same = [np.array_equal(group.all_reduce(x, "max"), x) for x in (a, b)]
        return float((a * b).sum()) if all(same) else np.nan
    return float(group.all_reduce(np.array((a * b).sum())))


def adjoint(group, name, shape, axis, other, seed, dtype="float64"):
    """Return <f(x), y>, <x, b(y)>, and the dtypes on the way; x and y of any size along `axis`."""
    replicated_in, replicated_out, _ = LAYOUTS[name]
    if name in TAKES_PARTS:
        shape = list(shape)
        shape[axis] = split_sizes(shape[axis], group.size)[group.rank]
    x = arrays(*shape, seed=[seed, 0 if replicated_in else 1 + group.rank], dtype=dtype)
    x = Tensor(x, requires_grad=True)
    y = call(name, x, group, axis, other)
    grad = arrays(*y.shape, seed=[seed, 99 if replicated_out else 100 + group.rank], dtype=dtype)
    y.backward(grad)
    assert x.grad.shape == x.shape
    return (
        one_product(group, y.data, grad, replicated_out),
        one_product(group, x.data, x.grad, replicated_in),
        {str(y.dtype), str(x.grad.dtype)},
    )


@st.composite
def places(draw):
    """Draw a shape, of up to 9 elements per side and perhaps none, and two of its axes."""
    shape = draw(st.lists(st.integers(0, 9), min_size=2, max_size=3))
    axis, other = draw(st.permutations(range(len(shape))))[:2]
    return shape, axis - len(shape) * draw(st.booleans()), other


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20)
@given(size=st.integers(1, 4), place=places(), seed=seeds)
def test_backward_is_the_adjoint_of_forward(cluster, name, size, place, seed):
    for forward, backward, dtypes in cluster(size, "thread").run(adjoint, name, *place, seed):
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12) and dtypes == {"float64"}


def test_the_dtype_stays(cluster):
    for name, dtype in product(LAYOUTS, ["float16", "float32"]):
        found = cluster(3, "thread").run(adjoint, name, [3, 5], 1, 0, 0, dtype)
        assert all(dtypes == {dtype} for _, _, dtypes in found), name


@both
def test_forward_gives_the_documented_layouts(cluster, transport):
    def worker(group, axis):
        N, r = group.size, group.rank
        whole, mine = arrays(7, 6, 9), arrays(7, 6, 9, seed=1 + r)
        total = sum(arrays(7, 6, 9, seed=1 + rank) for rank in range(N))
        ends, rows = split_ends(whole.shape[axis], N), split_ends(7, N)
        part = np.take(whole, range(ends[r], ends[r + 1]), axis)
        part_of_total = np.take(total, range(ends[r], ends[r + 1]), axis)
        moved = cf.all_to_all(Tensor(whole[rows[r] : rows[r + 1]]), group, cut=axis, joined=0)
        return [
            np.array_equal(cf.copy_to(Tensor(whole), group).data, whole),
            np.allclose(cf.reduce_from(Tensor(mine), group).data, total),
            np.array_equal(cf.scatter(Tensor(whole), group, axis).data, part),
            np.array_equal(cf.gather(Tensor(part), group, axis).data, whole),
            np.array_equal(cf.all_gather(Tensor(part), group, axis).data, whole),
            np.allclose(cf.reduce_scatter(Tensor(mine), group, axis).data, part_of_total),
            np.array_equal(moved.data, part),
        ]

    for axis in 1, -1:
        assert cluster(3, transport).run(worker, axis) == [[True] * 7] * 3


def test_gather_takes_a_part_of_the_gradient_and_all_gather_a_part_of_their_sum(cluster):
    """They are the same forward, and differ by the factor N where all ranks hand back the same."""

    def worker(group):
        found = []
        for function in (cf.gather, cf.all_gather):
            x = Tensor(arrays(2, 3, seed=group.rank), requires_grad=True)
            y = function(x, group, 0)
            y.backward(arrays(*y.shape, seed=50))
            found.append((y.data, x.grad))
        (y1, part), (y2, total) = found
        own = arrays(2 * group.size, 3, seed=50)[2 * group.rank :][:2]
        return (
            np.array_equal(y1, y2)
            and np.array_equal(part, own)
            and np.allclose(total, group.size * own, rtol=1e-14)
        )

    assert cluster(3, "thread").run(worker) == [True] * 3


def test_backward_calls_what_the_table_says_and_moves_its_bytes_or_nothing(cluster):
    def worker(group, name, needed):
        weight = Tensor(np.float64(2.0), requires_grad=True)
        shape = [3, 2 if name in TAKES_PARTS else 6]
        x = Tensor(arrays(*shape, seed=group.rank), requires_grad=needed)
        y = call(name, x, group, 1, 0)
        before = group.ledger.bytes.copy()
        (y * weight).sum().backward()
        return y.requires_grad, y.creator is not None, dict(group.ledger.bytes - before)

    whole, part = 3 * 6 * 8, 3 * 2 * 8
    sent = {
        "all_reduce": 2 * 2 * part,
        "all_gather": 2 * part,
        "reduce_scatter": whole - part,
        "all_to_all": 2 * part // 3,
    }
    for name, (_, _, operations) in LAYOUTS.items():
        want = {operation: sent[operation] for operation in operations}
        assert cluster(3, "thread").run(worker, name, True) == [(True, True, want)] * 3, name
        assert cluster(3, "thread").run(worker, name, False) == [(False, False, {})] * 3, name


def test_parts_that_backward_could_not_cut_are_refused_with_the_numbers(cluster):
    def worker(group, name):
        x = Tensor(np.ones((1 + 2 * group.rank, 2)), requires_grad=True)  # 1 and 3 of 4 rows
        call(name, x, group, 0, 1)

    for name in TAKES_PARTS:
        with pytest.raises(RankFailed, match=r"holds 1 of 4 .* not 2"):
            cluster(2, "thread").run(worker, name)


@both
def test_results_and_gradients_are_no_views_of_each_other(cluster, transport):
    """What one rank, or the caller, writes later must not show up in another's gradient."""

    def worker(group, name):
        shape = [3, 2 if name in TAKES_PARTS else 4]
        x = Tensor(arrays(*shape, seed=group.rank), requires_grad=True)
        y = call(name, x, group, 1, 0)
        grad = arrays(*y.shape, seed=7)
        y.backward(grad)
        kept = x.grad.copy()
        grad[...] = np.nan
        if name != "copy_to":  # which is the identity, and gives x itself
            y.data[...] = np.nan
        group.barrier()
        return np.array_equal(x.grad, kept) and not np.isnan(x.data).any()

    for name in LAYOUTS:
        assert cluster(2, transport).run(partial(worker, name=name)) == [True, True], name
