"""Memory that all ranks see, and the all_reduce in it."""

import multiprocessing
import os
import resource
import tempfile
import time
from unittest.mock import Mock

import numpy as np
import pytest

from minidist import Cluster, run
from minidist.comm.fabric import Mailbox
from minidist.comm.local.shared_memory import NOWHERE, create_file
from tests.strategies import arrays

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@both
def test_empty_is_aligned_and_its_places_are_used_again(cluster, transport):
    def worker(group):
        arrays = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        aligned = all(a.ctypes.data % 64 == 0 for a in arrays)
        apart = not any(np.may_share_memory(a, b) for a in arrays for b in arrays if a is not b)
        top = group.fabric.memory.top
        del arrays
        again = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        return aligned, apart, group.fabric.memory.top == top, again[3].shape

    assert cluster(2, transport).run(worker) == [(True, True, True, (5, 7))] * 2


def test_a_view_keeps_its_place_and_more_than_a_region_is_a_memory_error(cluster):
    def worker(group):
        view = group.empty((4, 4))[1:, 1:]
        view[:] = 7
        others = [group.empty((4, 4)) for _ in range(3)]
        for other in others:
            other[:] = 0
        try:
            group.empty(1 << 40)
        except MemoryError as error:
            return (view == 7).all(), "do not fit" in str(error)

    assert cluster(1).run(worker) == [(True, True)]


@linux
def test_freed_memory_goes_back_to_the_system_when_there_is_much_of_it():
    def worker(group):
        def resident():
            with open("/proc/self/smaps_rollup") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("Rss")) / 1024

        before = resident()
        pieces = [group.empty(40 << 20, "uint8") for _ in range(12)]
        for piece in pieces:
            piece[:] = 1
        full = resident()
        del pieces, piece
        return full - before, resident() - before

    full, freed = run(worker, 1)[0]
    assert full > 450 and freed < 300  # MiB: 256 MiB are kept for reuse


@linux
def test_an_array_larger_than_a_small_dev_shm_works(cluster):
    """The memory has no place in /dev/shm, which containers give 64 MB."""

    def worker(group):
        x = group.empty(20 << 20, "float32")
        x[:] = 1
        group.all_reduce(x, out=x)
        with open("/proc/self/maps") as maps:
            return float(x[-1]), any("/dev/shm" in line for line in maps)

    assert cluster(2).run(worker) == [(2.0, False)] * 2


def work(group):
    x = group.empty(1000)
    x[:] = group.rank
    group.all_reduce(x, out=x)
    group.barrier()
    return float(x[0]), group.all_gather(np.array([group.rank])).tolist()


@pytest.mark.parametrize("why_not", [AttributeError, PermissionError])  # macOS, a sandbox
def test_where_there_is_no_memfd_an_unlinked_file_serves(monkeypatch, tmp_path, why_not):
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=why_not), raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(work, 2) == [(1.0, [0, 1])] * 2
    assert os.listdir(tmp_path) == []


def test_regions_fit_the_limits_of_the_process(monkeypatch):
    limits = {resource.RLIMIT_AS: 1 << 31, resource.RLIMIT_FSIZE: 1 << 28}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    descriptor = create_file(3)
    region, rest = divmod(os.fstat(descriptor).st_size, 3)
    os.close(descriptor)
    assert (rest, region % 4096) == (0, 0) and 0.99 * (1 << 27) < 3 * region <= 1 << 27


def test_where_there_is_no_fork_server_ranks_are_spawned(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with Cluster(1) as ranks:
        kinds = ranks.run(lambda group: type(multiprocessing.current_process()).__name__)
        assert kinds == ["SpawnProcess"] and ranks.run(work) == [(0.0, [0])]


@both
def test_groups_that_are_made_and_dropped_do_not_disturb_a_slow_rank(cluster, transport):
    """A rank that has left a barrier must not take away what another still looks at."""

    def worker(group):
        def late(self, ready, sleep=Mailbox.sleep_until):
            sleep(self, ready)
            time.sleep(0.002)

        if group.rank == 1:
            Mailbox.sleep_until = late
        try:
            for step in range(40):
                sub = group.split(0)
                sub.barrier()
                assert float(sub.all_reduce(np.array(step, "f8"))) == step * group.size
                del sub
        finally:
            Mailbox.sleep_until = late.__defaults__[0]
        return "well"

    size = 2 if transport == "process" else 3
    assert cluster(size, transport).run(worker, timeout=60) == ["well"] * size


@both
def test_results_are_ordinary_arrays_and_keep_no_place_in_shared_memory(cluster, transport):
    def worker(group):
        x, shared = arrays(4, seed=group.rank), group.empty(4, "float64")
        shared[:] = x
        results = [
            group.all_reduce(x),
            group.all_reduce(shared),
            group.all_reduce(x, algorithm="ring"),
            group.all_gather(x),
            group.broadcast(shared),
            group.scatter([shared[:2], shared[2:]]),
            group.reduce_scatter(shared),
            *group.all_to_all([shared[:2], shared[2:]]),
        ]
        return [group.fabric.memory.offset_of(result) for result in results]

    assert cluster(2, transport).run(worker) == [[NOWHERE] * 9] * 2


@linux
def test_pages_that_are_given_back_take_no_neighbour_with_them(cluster):
    def worker(group):
        from minidist.comm.local import shared_memory

        keep, shared_memory.KEEP = shared_memory.KEEP, 0
        try:
            for nbytes in (5000, 4096, 12_345, 1 << 20):
                before, place, after = (group.empty(nbytes, "uint8") for _ in range(3))
                before[:], place[:], after[:] = 1, 2, 3
                del place
                assert (before == 1).all() and (after == 3).all(), nbytes
        finally:
            shared_memory.KEEP = keep
        return "well"

    assert cluster(1).run(worker) == ["well"]
