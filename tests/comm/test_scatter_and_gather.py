"""reduce_scatter and all_gather(out=): in shared memory and on messages, one result.

An array from `empty` is reduced, or written to, where it lies; any other one travels in messages.
"""

from functools import reduce

import numpy as np
import pytest

from minidist.comm.collectives import split_ends, split_sizes
from minidist.comm.shared_memory_communicator import PIECE
from minidist.errors import CollectiveMismatch, Deadlock, RankFailed
from tests.strategies import arrays

both = pytest.mark.parametrize("transport", ["process", "thread"])
UNEQUAL = {
    1: [[5]],
    2: [[5, 0], [2, 3]],
    3: [[0, 5, 0], [1, 3, 1]],
    4: [[0, 0, 4, 1], [2, 2, 1, 0]],
}


def placed(group, values, shared):
    """Return the values in an array from `empty`, or in an ordinary one."""
    x = group.empty(values.shape, values.dtype) if shared else np.empty_like(values)
    x[...] = values
    return x


def where(group):
    """Return whether the array is in shared memory: always, never, on all ranks but one."""
    return True, False, group.rank != group.size - 1


def total(n, size, op=np.add, dtype="float64"):
    """Return the reduction in rank order of what the ranks' arrays hold."""
    return reduce(op, [(4 * arrays(n, seed=rank)).astype(dtype) for rank in range(size)])


def scatter(group, n, sizes=None, dtype="float64", op="sum"):
    """Return (bits, bytes moved) of a reduce_scatter for each place of x, and whether x is kept."""
    found, values = [], (4 * arrays(n, seed=group.rank)).astype(dtype)
    for shared in where(group):
        x, before = placed(group, values, shared), group.ledger.bytes["reduce_scatter"]
        piece = group.reduce_scatter(x, sizes, op=op)
        moved = group.ledger.bytes["reduce_scatter"] - before
        kept = x.tobytes() == values.tobytes() and not np.may_share_memory(piece, x)
        found.append((piece.dtype.name, piece.tobytes(), moved, kept))
    return found


def assert_scattered(rows, want, sizes):
    ends = [0, *np.cumsum(sizes)]
    for rank, row in enumerate(rows):
        piece = want[ends[rank] : ends[rank + 1]]
        moved = want.nbytes - piece.nbytes
        assert row == [(want.dtype.name, piece.tobytes(), moved, True)] * 3


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_scattered_sum_has_the_same_bits_and_bytes_wherever_the_arrays_lie(
    cluster, transport, size
):
    ranks = cluster(size, transport)
    for n in [0, 1, size - 1, size + 1, 101, 2 * size * PIECE // 8 + 3]:
        assert_scattered(ranks.run(scatter, n), total(n, size), split_sizes(n, size))
    for sizes in UNEQUAL[size]:
        assert_scattered(ranks.run(scatter, 5, sizes), total(5, size), sizes)


@both
@pytest.mark.parametrize("size", [2, 3])
def test_a_scattered_reduction_of_every_dtype_and_kind(cluster, transport, size):
    kinds = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    for dtype in ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128"]:
        for op, combine in kinds.items():
            rows = cluster(size, transport).run(scatter, 7, None, dtype, op)
            assert_scattered(rows, total(7, size, combine, dtype), split_sizes(7, size))


@both
def test_rows_and_strided_arrays_are_scattered_as_well(cluster, transport):
    def worker(group):
        found = []
        for shared in where(group):
            rows = placed(group, arrays(5, 3, seed=group.rank), shared)
            line = placed(group, arrays(10, seed=group.rank), shared)
            found.append([group.reduce_scatter(rows), group.reduce_scatter(line[::2])])
        return found

    ends = split_ends(5, 3)
    for rank, found in enumerate(cluster(3, transport).run(worker)):
        mine = slice(ends[rank], ends[rank + 1])
        for rows, line in found:
            assert np.array_equal(rows, sum(arrays(5, 3, seed=r) for r in range(3))[mine])
            assert np.array_equal(line, sum(arrays(10, seed=r) for r in range(3))[::2][mine])


@both
def test_what_is_written_after_a_reduce_scatter_does_not_reach_the_others(cluster, transport):
    def worker(group):
        x, wrong = group.empty(50_000, "float64"), 0
        for step in range(30):
            x[:] = group.rank + step
            piece = group.reduce_scatter(x)
            x[:] = np.nan  # at once, while slower ranks may still be busy
            wrong += not (piece == 6 + 4 * step).all()
            piece[:] = np.nan
        return wrong

    assert cluster(4, transport).run(worker) == [0] * 4


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gather_into_out_has_the_same_bits_and_bytes_wherever_out_lies(cluster, transport, size):
    def worker(group, n, dtype):
        ends, found = split_ends(n, group.size), []
        whole = (4 * arrays(n, seed=9)).astype(dtype)
        mine = slice(ends[group.rank], ends[group.rank + 1])
        for shared in where(group):
            for own in (False, True):  # x: apart, or its own part of out
                out = placed(group, np.zeros(n, dtype), shared)
                x = out[mine] if own else np.empty(mine.stop - mine.start, dtype)
                x[:] = whole[mine]
                before = group.ledger.bytes["all_gather"]
                same = group.all_gather(x, out=out) is out
                moved = group.ledger.bytes["all_gather"] - before
                found.append(
                    same
                    and out.tobytes() == whole.tobytes()
                    and x.tobytes() == whole[mine].tobytes()
                )
                found.append(moved == (group.size - 1) * x.nbytes)
        return found

    for n in [0, 1, size - 1, size + 1, 101, 100_003]:
        for dtype in ["float64"] if n > 200 else ["float64", "bool", "int16", "complex64"]:
            assert cluster(size, transport).run(worker, n, dtype) == [[True] * 12] * size


@both
@pytest.mark.parametrize("shared", [True, False])
def test_a_piece_may_lie_anywhere_in_out(cluster, transport, shared):
    """Every rank's piece is where another rank's goes."""

    def worker(group, shared):
        out = placed(group, np.full(6, 10.0 * group.rank), shared)
        group.all_gather(out[4 - 2 * group.rank :][:2], out=out)
        return out.tolist()

    assert cluster(3, transport).run(worker, shared) == [[0.0, 0.0, 10.0, 10.0, 20.0, 20.0]] * 3


@both
def test_what_is_written_after_a_gather_does_not_reach_the_others(cluster, transport):
    def worker(group):
        ends, out, wrong = split_ends(90_001, group.size), group.empty(90_001, "float64"), 0
        want = np.repeat(np.arange(group.size), np.diff(ends))
        for step in range(30):
            x = np.full(ends[group.rank + 1] - ends[group.rank], group.rank + step, "float64")
            group.all_gather(x, out=out)
            wrong += not np.array_equal(out, want + step)
            out[:] = x[:] = np.nan
        return wrong

    assert cluster(4, transport).run(worker) == [0] * 4


@both
@pytest.mark.parametrize(
    "x, out",
    [
        (np.zeros(3), np.zeros(5)),  # the first of two ranks has 3 of 5, the second 2
        (np.zeros((1, 2)), np.zeros((2, 2))),
        (np.zeros(2, "float32"), np.zeros(4)),
        (np.zeros((2, 1)), np.zeros(4)),
    ],
)
def test_pieces_that_do_not_make_up_out_are_refused(cluster, transport, x, out):
    with pytest.raises(RankFailed, match="part of out") as caught:
        cluster(2, transport).run(lambda group: group.all_gather(x, out=out))
    assert isinstance(caught.value.__cause__, ValueError)


@both
def test_sizes_that_do_not_cut_x_are_refused(cluster, transport):
    for sizes in ([1, 2], [4], [5, -1]):
        with pytest.raises(RankFailed, match=r"do not cut 4 rows into 2 pieces"):
            cluster(2, transport).run(lambda g, s: g.reduce_scatter(g.empty(4), s), sizes)


def different(group, calls):
    calls[group.rank](group)


DIFFERENT = [
    (lambda g: g.reduce_scatter(g.empty(4)), lambda g: g.reduce_scatter(g.empty(5)), r"\(5,\)"),
    (
        lambda g: g.reduce_scatter(g.empty(4), [1, 3]),
        lambda g: g.reduce_scatter(g.empty(4), [3, 1]),
        r"\(3, 1\)",
    ),
    (
        lambda g: g.reduce_scatter(g.empty(4), op="max"),
        lambda g: g.reduce_scatter(g.empty(4)),
        "max",
    ),
    (
        lambda g: g.all_gather(np.zeros(1), out=g.empty(2, "float64")),
        lambda g: g.all_gather(np.zeros(1)),
        "out",
    ),
    (
        lambda g: g.all_gather(g.empty(2), out=g.empty(4), label="layer 0"),
        lambda g: g.all_gather(g.empty(2), out=g.empty(4), label="layer 1"),
        "layer 1",
    ),
    (
        lambda g: g.all_gather(g.empty(2), out=g.empty(4)),
        lambda g: g.all_gather(g.empty(2), out=g.empty(5)),
        r"\(5,\)",
    ),
    (lambda g: g.reduce_scatter(g.empty(4)), lambda g: g.all_reduce(g.empty(4)), "all_reduce"),
]


@pytest.mark.parametrize(
    "transport, case", [*[("thread", case) for case in DIFFERENT], ("process", DIFFERENT[3])]
)
def test_ranks_that_call_different_things_are_told(cluster, transport, case):
    *calls, words = case
    with pytest.raises(CollectiveMismatch, match=words) as caught:
        cluster(2, transport).run(different, calls)
    assert "test_scatter_and_gather.py" in str(caught.value)


@both
def test_a_rank_that_waits_in_a_scatter_for_ever_is_told(cluster, transport):
    def worker(group):
        if group.rank == 0:
            group.reduce_scatter(group.empty(4), label="w")

    with pytest.raises(Deadlock, match=r"reduce_scatter\(.*label='w'\) for rank 1"):
        cluster(2, transport).run(worker, timeout=8)


@both
def test_split_groups_scatter_and_gather_among_themselves(cluster, transport):
    def worker(group):
        pair = group.split(group.rank % 2)  # ranks 0 and 2, ranks 1 and 3
        x = pair.empty(5, "float64")
        x[:] = 10**group.rank
        piece = pair.reduce_scatter(x)
        out = pair.empty(5, "float64")
        pair.all_gather(piece, out=out)
        return out.tolist(), piece.size, group.ledger.total, dict(pair.ledger.bytes)

    for rank, (out, size, outside, moved) in enumerate(cluster(4, transport).run(worker)):
        assert out == [101.0 if rank % 2 == 0 else 1010.0] * 5
        assert size == [3, 3, 2, 2][rank] and outside == 0
        assert moved == {"reduce_scatter": 8 * (5 - size), "all_gather": 8 * size}


@both
def test_a_scatter_and_a_gather_are_an_all_reduce_in_bits_and_in_bytes(cluster, transport):
    def worker(group):
        x = placed(group, arrays(1003, seed=group.rank), True)
        want = group.all_reduce(x)
        once = group.ledger.total
        out = group.empty(1003, "float64")
        group.all_gather(group.reduce_scatter(x), out=out)
        return out.tobytes() == want.tobytes(), group.ledger.total == 2 * once

    assert cluster(3, transport).run(worker) == [(True, True)] * 3
