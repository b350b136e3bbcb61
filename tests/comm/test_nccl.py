"""Ranks with a GPU each: what NCCL moves, what it is not asked to move, and how it ends.

The contract of Group is in conformance/, on the machine "process, nccl". Here on the stand-in for
CuPy, which has a record of what was called; `pytest --device strict`.
"""

import itertools
import sys
from contextlib import suppress
from functools import partial

import cloudpickle
import numpy as np
import pytest

from minidist import Cluster
from minidist.backend import to_device, to_host
from minidist.comm import nccl
from minidist.errors import CollectiveMismatch, Deadlock
from tests.comm import conformance
from tests.comm.conformance.inputs import DTYPES, KINDS, mine, same, total

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import pytest
cloudpickle.register_pickle_by_value(conformance)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def stand_in(gpu):
    """Return cupy.cuda.nccl of the stand-in."""
    from cupy.cuda import nccl as library

    if "strict_device" not in library.__file__:
        pytest.skip("needs pytest --device strict: only the stand-in records its calls")
    return library


@pytest.fixture
def ranks(cluster):
    return partial(cluster, transport="nccl", device="gpu")


def recorded(call):
    """Return what the call returns, and the names of the calls of NCCL that it made."""
    from cupy.cuda import _nccl_root

    before = len(_nccl_root.calls)
    return call(), _nccl_root.calls[before:]


# Which way an array takes.


def ways(group):
    """Return the calls of NCCL of several collectives, and whether the results are right."""
    N, r = group.size, group.rank
    even, uneven = [2] * N, [2 * N] + [0] * (N - 1)
    values = np.arange(2.0 * N)
    x, want, wrong, made = to_device(values + r, "gpu"), N * values + N * (N - 1) / 2, [], {}

    def check(name, call, want):
        got, made[name] = recorded(call)
        if to_host(got).tolist() != want.tolist():
            wrong.append(name)

    check("all_reduce", lambda: group.all_reduce(x), want)
    check("of an array on the host", lambda: group.all_reduce(values + r), want)
    check("in place", lambda: group.all_reduce(y := x.copy(), out=y), want)
    check("max", lambda: group.all_reduce(x, op="max"), values + N - 1)
    for name, sizes in (("even", even), ("uneven", uneven)):
        begin = sum(sizes[:r])
        part = slice(begin, begin + sizes[r])
        check(name, lambda s=sizes: group.reduce_scatter(x, s), want[part])
        out = group.empty(2 * N, "float64")
        check(
            f"{name} gather",
            lambda s=sizes, o=out, p=part: group.all_gather(values[p], out=o, sizes=s),
            values,
        )
    return made, wrong


def test_nccl_reduces_and_gathers_and_uneven_pieces_take_a_call_each(ranks):
    whole = {name: ["allReduce"] for name in ("all_reduce", "of an array on the host", "in place")}
    pieces = {
        "even": ["reduceScatter"],
        "even gather": ["allGather"],
        "uneven": ["reduce"],  # the other pieces are empty
        "uneven gather": ["broadcast"],
    }
    assert ranks(3).run(ways) == [({**whole, "max": [], **pieces}, [])] * 3


def reduced_by_nccl(group, n):
    """Return the (dtype, op) that NCCL has reduced, and those whose result is wrong."""
    by_nccl, wrong = [], []
    for dtype, op in itertools.product(DTYPES, KINDS):
        if dtype == "complex128" and op in ("max", "min"):
            continue
        values = mine(group.rank, (n,), dtype=dtype)
        if values.dtype.kind == "f":
            values[group.rank] = np.nan
        want = total(group.size, (n,), dtype=dtype, combine=KINDS[op])
        if values.dtype.kind == "f":
            want[: group.size] = np.nan
        got, calls = recorded(lambda x=values, op=op: group.all_reduce(to_device(x, "gpu"), op))
        if calls:
            by_nccl.append((dtype, op))
        got = to_host(got)
        nan = np.isnan(want)
        if not (np.isnan(got) == nan).all() or not same(got[~nan], want[~nan], False):
            wrong.append((dtype, op))
    return by_nccl, wrong


def test_nccl_reduces_what_it_reduces_as_numpy_does_and_the_rest_goes_another_way(ranks):
    """NCCL has no bool and no uint16, its maximum ignores NaN, and it knows no complex numbers.

    It has float16, whose sums depend too much on their order.
    """
    every = [("int8", op) for op in KINDS] + [("int64", op) for op in KINDS]
    some = [("float32", "sum"), ("float32", "prod")]
    for by_nccl, wrong in ranks(2).run(reduced_by_nccl, 50):
        assert not wrong
        assert sorted(by_nccl) == sorted([*every, *some, ("complex128", "sum")])


def test_the_bytes_that_nccl_moves_are_those_of_the_formula_and_say_so(ranks):
    def worker(group):
        x = to_device(np.ones(7), "gpu")
        group.all_reduce(x)
        group.reduce_scatter(x)
        group.all_gather(x[: 3 - (group.rank > 0)], out=group.empty(7, "float64"))
        return dict(group.ledger.bytes)

    rows = ["all_reduce (by formula)", "reduce_scatter (by formula)", "all_gather (by formula)"]
    for rank, found in enumerate(ranks(3).run(worker)):
        own = [3, 2, 2][rank]
        assert found == dict(zip(rows, [8 * (7 + own), 8 * (7 - own), 16 * own], strict=True))


def test_nccl_works_on_the_stream_that_has_made_the_array(ranks):
    """On another one it would read what is not written yet: the stand-in calls that a race."""

    def worker(group):
        import cupy

        with cupy.cuda.Stream(non_blocking=True):
            x = to_device(np.arange(2.0), "gpu")
            return group.all_reduce(x).tolist(), group.broadcast(x, root=1).tolist()

    assert ranks(2).run(worker) == [([0.0, 2.0], [0.0, 1.0])] * 2


# One rank per GPU, and a library.


def test_more_ranks_than_gpus_are_refused_with_the_remedy():
    from minidist.backend import gpus

    remedy = r"use transport='process', whose ranks may share a GPU and its memory \(CUDA IPC\)"
    with pytest.raises(ValueError, match=f"{gpus() + 1} ranks would share {gpus()} GPUs.*{remedy}"):
        Cluster(gpus() + 1, "nccl", "gpu")
    with pytest.raises(ValueError, match=f"2 ranks would share 1 GPU: .*{remedy}"):
        Cluster(2, "nccl", "gpu:1")


def test_a_missing_library_and_arrays_on_the_host_are_refused_with_the_remedy(
    monkeypatch, stand_in
):
    with pytest.raises(ValueError, match="give device 'gpu'"):
        Cluster(2, "nccl", "cpu")
    nccl.load.cache_clear()
    monkeypatch.setattr(stand_in, "available", False)
    with pytest.raises(ValueError, match="pip install nvidia-nccl-cu12"):
        Cluster(2, "nccl", "gpu")
    nccl.load.cache_clear()


# Mistakes are found on the host; nothing is left.


def test_ranks_that_disagree_are_told_before_nccl_is_asked(ranks):
    def worker(group):
        odd = group.rank == 1

        def disagree():
            wrong = [
                lambda: group.all_reduce(to_device(np.ones(2 + odd), "gpu")),
                lambda: group.reduce_scatter(to_device(np.ones(2), "gpu"), [1 + odd, 1 - odd]),
                lambda: group.all_gather(
                    np.ones(1, "f4"), out=group.empty(2, "f4"), label=str(odd)
                ),
            ]
            for call in wrong:
                with suppress(CollectiveMismatch):
                    call()
                    return "no error"

        found = recorded(disagree)
        return found, group.all_reduce(to_device(np.ones(2), "gpu")).tolist()

    assert ranks(2).run(worker) == [((None, []), [2.0, 2.0])] * 2


def test_a_rank_that_does_not_come_is_a_deadlock_and_no_kernel_waits_for_it(ranks):
    def worker(group):
        group.all_reduce(np.ones(2)) if group.rank < 2 else group.recv(0)

    with pytest.raises(Deadlock, match=r"rank 0: waits in all_reduce\(sum.* for rank 2 "):
        ranks(3).run(worker, timeout=20)


def test_what_a_run_opens_is_destroyed_before_the_next_one_and_nothing_is_dropped(ranks):
    """Groups that NCCL moves nothing for open nothing."""

    def worker(group):
        from cupy.cuda import _nccl_root as library

        found = len(library.living), library.leaked
        pair, _ = group.split(group.rank // 2), group.split(0)
        for each in (pair, group, pair):
            each.all_reduce(np.ones(2))
        return found, len(library.living)

    with Cluster(4, "nccl", "gpu") as new:
        for _ in range(3):
            assert new.run(worker) == [((0, []), 2)] * 4
