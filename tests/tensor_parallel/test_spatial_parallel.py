"""Images cut by rows: halos, their gradients, and a CNN that never sees a whole image."""

import copy
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidist import Mesh, Tensor, nn, no_grad
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.errors import RankFailed
from minidist.nn.datasets import shard
from minidist.pieces import split_ends
from minidist.tensor_parallel import SpatialConv2d
from minidist.tensor_parallel.spatial_parallel import (
    HaloExchange,
    Halos,
    SpatialPool,
    own_rows,
    spatial_parallel,
    sum_partial,
)
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import collect, random_weights
from tests.strategies import arrays, seeds
from tests.tensor_parallel.judges import check

ROWS = 2  # the axis


def every_halo(most=7):
    """Yield Halos of all small heights, ranks, kernels, strides and paddings that fit."""
    for H, N, kernel, stride, padding in product(
        range(1, most + 1), range(1, 5), range(1, 5), range(1, 4), range(4)
    ):
        if N <= H and padding < kernel <= H + 2 * padding:
            try:
                yield Halos(tuple(split_ends(H, N)), kernel, stride, padding)
            except ValueError:
                continue


def test_every_row_of_the_output_is_computed_once_from_the_rows_that_its_window_sees():
    all_of_them = list(every_halo())
    assert len(all_of_them) > 300
    for halos in all_of_them:
        N, rows = len(halos.ends) - 1, halos.after[-1]
        assert halos.after[0] == 0 and all(a < b for a, b in pairwise(halos.after))
        assert rows == (halos.ends[-1] + 2 * halos.padding - halos.kernel) // halos.stride + 1
        for r in range(N):
            needs = halos.needs(r)
            for p in range(*halos.after[r : r + 2]):
                first = p * halos.stride - halos.padding
                assert set(range(first, first + halos.kernel)) <= set(needs), halos
            found = [row for q in range(N) for row in halos.piece(r, q)]
            assert found == [row for row in needs if 0 <= row < halos.ends[-1]], halos


@st.composite
def cuts(draw, ranks):
    """Draw where ranks' rows end, each with one or more: in no order of size."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks))
    return tuple(np.cumsum([0, *lengths]).tolist())


def exchanged(group, halos, seed):
    """Return the whole X, the needed rows, a random dY and dX on this rank."""
    x = arrays(2, 3, halos.ends[-1], 2, seed=seed)
    own = halos.has(group.rank)
    part = Tensor(x[:, :, own.start : own.stop], requires_grad=True)
    y = HaloExchange(group, halos)(part)
    dy = arrays(*y.shape, seed=[seed, group.rank])
    y.backward(dy)
    return x, y.data, dy, part.grad


@settings(max_examples=25)
@given(
    data=st.data(),
    size=st.integers(1, 4),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 2),
    seed=seeds,
)
def test_an_exchange_is_a_copy_of_rows_and_its_backward_the_adjoint(
    cluster, size, data, kernel, stride, seed
):
    ends, padding = data.draw(cuts(size)), data.draw(st.integers(0, kernel - 1))
    try:
        halos = Halos(ends, kernel, stride, padding)
    except ValueError:
        assume(False)
    found = cluster(size, "thread").run(exchanged, halos, seed)
    want = np.zeros((2, 3, ends[-1], 2))
    for r, (x, y, dy, _) in enumerate(found):
        needs = halos.needs(r)
        seen = [row for row in needs if 0 <= row < ends[-1]]
        at = [row - needs.start for row in seen]
        np.testing.assert_array_equal(y[:, :, at], x[:, :, seen])
        assert not np.delete(y, at, axis=ROWS).any(), "beyond the image there are zeros"
        want[:, :, seen] += dy[:, :, at]
    got = np.concatenate([dx for *_, dx in found], axis=ROWS)
    np.testing.assert_allclose(got, want, rtol=1e-12, err_msg="dX is no sum of the dY of halos")


def judge(group, layer, split, x, seed):
    """Compare output and gradients of layers on rows of x with those on the whole."""
    whole, parts = layer, split(copy.deepcopy(layer), group)
    want_x, got_x = Tensor(x, requires_grad=True), Tensor(own_rows(x, group), requires_grad=True)
    want_y, got_y = whole(want_x), parts(got_x)
    dy = arrays(*want_y.shape, seed=[seed, 99])
    want_y.backward(dy)
    rows = np.cumsum([0, *group.all_gather(np.array([got_y.shape[ROWS]]))])
    got_y.backward(dy[:, :, rows[group.rank] : rows[group.rank + 1]])
    want = collect(whole, want_x) | {"(output)": want_y.data}
    got = {name: group.all_reduce(g) for name, g in collect(parts).items()}
    for name, part in (("(input)", got_x.grad), ("(output)", got_y.data)):
        got[name] = group.all_gather(part, ROWS)
    return compare([got], want)


@settings(max_examples=25)
@given(
    size=st.integers(1, 4),
    H=st.integers(4, 9),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    seed=seeds,
)
def test_a_convolution_of_rows_leaves_the_gradients_of_the_whole_image(
    cluster, size, H, kernel, stride, padding, seed
):
    assume(padding < kernel)
    ends = tuple(split_ends(H, size))
    try:
        Halos(ends, kernel, stride, padding)
    except ValueError:
        assume(False)
    layer = nn.Conv2d(2, 3, kernel, stride, padding, activation="relu", dtype="float64")
    split = partial(SpatialConv2d, ends=ends)
    x = arrays(2, 2, H, 5, seed=seed)
    check(cluster(size, "thread").run(judge, random_weights(layer, seed), split, x, seed))


def test_squares_may_lie_over_a_border(cluster):
    for H, k, size in [(8, 2, 2), (10, 2, 3), (12, 3, 4)]:
        split = partial(SpatialPool, ends=tuple(split_ends(H, size)))
        x = arrays(2, 2, H, 2 * k)
        check(cluster(size, "thread").run(judge, nn.AveragePool(k), split, x, 0))


def cnn(widths=(4, 4, 6)):
    return random_weights(nn.CNN(2, 3, widths, seed=1, dtype="float64"))


def rows_and_examples(group, statistics):
    """Compare the gradients where dp ranks have other examples, tp ranks other rows of these."""
    mesh, model = Mesh(group, dp=2, tp=2), cnn()
    x, labels = arrays(3, 2, 8, 4), np.arange(3)
    whole = copy.deepcopy(model)
    nn.cross_entropy(whole(x), labels).backward()
    if statistics == "examples, then rows":
        sync_batch_norm(model, mesh.dp)
    model = spatial_parallel(model, mesh.tp, 8)
    sync_batch_norm(model, mesh.dp if statistics == "rows, then examples" else group)
    mine = shard(np.arange(3), mesh.dp.rank, 2)
    logits = model(own_rows(x[mine], mesh.tp))
    nn.cross_entropy(logits, labels[mine], 3).backward()
    sum_partial(model, mesh.tp)
    all_reduce_gradients(model, mesh.dp)
    return compare([collect(model)], collect(whole))


def test_rows_go_with_examples_if_statistics_are_of_all_ranks(cluster):
    check(cluster(4, "thread").run(rows_and_examples, "of both"))
    for statistics in "examples, then rows", "rows, then examples":
        words = "stem.norm is shared by the ranks .*, and this group leaves out .*; call sync_batch"
        with pytest.raises(RankFailed, match=words):
            cluster(4, "thread").run(rows_and_examples, statistics)


def test_ranks_evaluate_as_one_device_does(cluster):
    def worker(group):
        model, x = nn.CNN(2, 3, (4, 6), dtype="float64"), arrays(3, 2, 10, 4)
        want = copy.deepcopy(model).eval()(x).data
        with no_grad():
            return abs(spatial_parallel(model, group, 10).eval()(own_rows(x, group)).data - want)

    assert np.max(cluster(3, "thread").run(worker)) < 1e-12
