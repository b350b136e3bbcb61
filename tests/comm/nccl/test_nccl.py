"""Ranks with a GPU each: what NCCL moves, what it is not asked to move, and how it ends.

The contract of Group is in conformance/, on the machine "process, nccl". Here on the stand-in for
CuPy, which has a record of what was called; `pytest --device strict`.
"""

import itertools
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest

from minidist import Cluster
from minidist.backend import on_gpu, to_device, to_host
from minidist.comm import cluster as cluster_module
from minidist.comm import nccl
from minidist.comm import nccl as nccl_communicator
from minidist.comm.fabric import Fabric
from minidist.comm.local.processes import ProcessRanks
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.errors import CollectiveMismatch, Deadlock, RankFailed, is_wrong_input
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


def test_one_rank_alone_does_not_need_nccl(ranks):
    made, wrong = ranks(1).run(ways)[0]
    assert not wrong and not any(made.values())


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


def test_a_run_knows_whether_nccl_has_added_up_in_an_order_of_its_own(ranks):
    def worker(group, dtype, size):
        some = group.split(int(group.rank < size))
        x = to_device(np.ones(6, dtype), "gpu")
        some.reduce_scatter(x)
        some.all_gather(x[:1], out=some.empty(some.size, dtype))
        first, group.fabric.reordered = group.fabric.reordered, False
        some.all_reduce(x)
        return first, group.fabric.reordered

    for dtype, size, want in [("float64", 3, True), ("float64", 2, False), ("int64", 3, False)]:
        assert ranks(3).run(worker, dtype, size)[0] == (want, want)
    assert ranks(3).run(lambda group: group.fabric.reordered) == [False] * 3


def test_an_array_that_is_a_part_of_out_is_reduced_as_it_was(ranks):
    def worker(group):
        both = to_device(np.arange(6.0), "gpu")
        return to_host(group.all_reduce(both[1:], out=both[:-1])).tolist()

    assert ranks(2).run(worker) == [[2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def test_nccl_works_on_the_stream_that_has_made_the_array(ranks):
    """On another one it would read what is not written yet: the stand-in calls that a race."""

    def worker(group):
        import cupy

        with cupy.cuda.Stream(non_blocking=True):
            x = to_device(np.arange(2.0), "gpu")
            return group.all_reduce(x).tolist(), group.broadcast(x, root=1).tolist()

    assert ranks(2).run(worker) == [([0.0, 2.0], [0.0, 1.0])] * 2


def test_a_thread_of_the_worker_uses_the_gpu_of_its_rank(ranks):
    """A thread begins with GPU 0, on which no rank but the first has anything."""

    def worker(group):
        found = []
        thread = threading.Thread(
            target=lambda: found.append(group.split(0).all_reduce(np.ones(2)).tolist())
        )
        thread.start()
        thread.join()
        return found

    assert ranks(3).run(worker) == [[[3.0, 3.0]]] * 3


def moved(group):
    """Return the calls of NCCL in collectives that only move arrays, and what these return."""
    r = group.rank

    def there(values):
        return to_device(values, "gpu")

    turned, whole = there(np.arange(6.0)).reshape(2, 3).T, there(np.array(7.0 + r))
    rows = there(np.full((r, 2), r % 2 == 1))  # of which one is empty
    pieces = [there(np.full(s, 10 * r + s)) for s in range(group.size)]
    pieces[0] = to_host(pieces[0]) if r == 1 else pieces[0]
    calls = {
        "broadcast": lambda: group.broadcast(turned if r == 1 else None, root=1),
        "of one number": lambda: group.broadcast(whole if r == 0 else None),
        "scatter": lambda: group.scatter(pieces if r == 2 else None, root=2),
        "gather": lambda: group.gather(rows, root=1),
        "all_gather": lambda: group.all_gather(rows),
        "reduce": lambda: group.reduce(whole, root=2),
    }
    made, found = {}, {}
    for name, call in calls.items():
        got, made[name] = recorded(call)
        found[name] = None if got is None else (on_gpu(got), to_host(got).tolist())
    got, made["all_to_all"] = recorded(lambda: group.all_to_all(pieces))
    found["all_to_all"] = [to_host(piece).tolist() for piece in got]
    return made, found


def test_nccl_sends_what_collectives_move_whatever_its_shape_and_the_host_sends_the_rest(ranks):
    """Rank 1 has one array on the host: its piece for rank 0, which is empty."""
    results = ranks(3).run(moved)
    column, rows = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [[True, True], [False, False], [False] * 2]
    for r, (_, found) in enumerate(results):
        assert found == {
            "broadcast": (True, column),
            "of one number": (True, 7.0),
            "scatter": (True, [20 + r] * r),
            "gather": (True, rows) if r == 1 else None,
            "all_gather": (True, rows),
            "reduce": (True, 24.0) if r == 2 else None,
            "all_to_all": [[10 * s + r] * r for s in range(3)],
        }
    send, recv = ["send"], ["recv"]
    assert [made for made, _ in results] == [
        {
            "broadcast": recv,
            "of one number": send * 2,
            "scatter": [],  # nothing, to rank 0
            "gather": [],
            "all_gather": recv * 2,
            "reduce": send,
            "all_to_all": send * 2,
        },
        {
            "broadcast": send * 2,
            "of one number": recv,
            "scatter": recv,
            "gather": recv,
            "all_gather": send * 2 + recv,
            "reduce": send,
            "all_to_all": send + recv * 2,
        },
        {
            "broadcast": recv,
            "of one number": recv,
            "scatter": send,
            "gather": send,
            "all_gather": send * 2 + recv,
            "reduce": recv * 2,
            "all_to_all": send + recv * 2,
        },
    ]


def test_groups_that_threads_use_at_once_have_a_communicator_each(ranks):
    def worker(group):
        groups, found = [group.split(0) for _ in range(6)], {}

        def work(i):
            found[i] = groups[i].all_reduce(np.full(1, float(i))).item()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for _ in range(3):
        assert ranks(2).run(worker) == [{i: 2.0 * i for i in range(6)}] * 2


# One rank per GPU, and a library.


def test_more_ranks_than_gpus_are_refused_with_the_remedy():
    from minidist.backend import gpus

    remedy = r"use transport='process', whose ranks may share a GPU and its memory \(CUDA IPC\)"
    with pytest.raises(ValueError, match=f"{gpus() + 1} ranks would share {gpus()} GPUs.*{remedy}"):
        Cluster(gpus() + 1, "nccl", "gpu")
    with pytest.raises(ValueError, match=f"2 ranks would share 1 GPU: .*{remedy}"):
        Cluster(2, "nccl", "gpu:1")


def test_two_ranks_on_one_gpu_are_named_before_nccl_is_asked(monkeypatch):
    below = partial(nccl_communicator.connect, SharedMemoryCommunicator.connect)
    monkeypatch.setitem(cluster_module.TRANSPORTS, "one gpu", partial(ProcessRanks, connect=below))
    with (
        Cluster(3, "one gpu", "gpu:1") as ranks,
        pytest.raises(RankFailed, match=r"ranks 0 and 1 .* GPU, 0x11000 .* host 0") as caught,
    ):
        ranks.run(lambda group: "never")
    assert is_wrong_input(caught.value)


def test_the_same_address_on_two_hosts_is_two_gpus():
    nccl.check_gpus([7, 8, 7, 8], hosts=[0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"ranks 2 and 3 are on one GPU, 0x7 .* host 1"):
        nccl.check_gpus([7, 8, 7, 7], hosts=[0, 0, 1, 1])


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


def test_a_rank_that_fails_after_the_meeting_ends_the_others_that_wait_for_its_kernel(ranks):
    def worker(group):
        group.all_reduce(np.ones(2))
        if group.rank == 1:
            group.communicator._start = lambda *_: 1 // 0
        group.all_reduce(np.ones(2))

    with pytest.raises(RankFailed, match=r"rank 1 failed(.|\n)*ZeroDivisionError"):
        ranks(2).run(worker, timeout=20)
    assert ranks(2).run(lambda group: group.all_reduce(np.ones(1)).tolist()) == [[2.0]] * 2


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


def test_an_abort_ends_a_thread_that_waits_for_the_kernel_of_a_rank_that_is_gone(stand_in):
    """As when a run fails under MPI, whose ranks are threads that cannot be killed."""
    from cupy import cuda

    unique, comms, found = stand_in.get_unique_id(), {}, []

    def join(rank):
        cuda.Device(rank).use()
        comms[rank] = stand_in.NcclCommunicator(2, unique, rank)

    def wait():
        cuda.Device(0).use()
        x = to_device(np.ones(2), "gpu")
        try:
            comms[0].allReduce(x.data.ptr, x.data.ptr, 2, stand_in.NCCL_FLOAT64, 0, 0)
        except stand_in.NcclError as error:
            found.append(str(error))

    for threads in ([partial(join, 0), partial(join, 1)], [wait]):
        threads = [threading.Thread(target=target) for target in threads]
        for thread in threads:
            thread.start()
        if len(threads) == 1:
            time.sleep(0.2)
            assert threads[0].is_alive()
            fabric = SimpleNamespace(opened={(): comms[0]})
            Fabric.free_groups(fabric, failed=True)
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    comms[1].abort()
    assert len(found) == 1 and "aborted" in found[0] and not fabric.opened
