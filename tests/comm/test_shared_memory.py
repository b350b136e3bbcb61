"""Memory that all ranks see, and the all_reduce in it."""

import gc
import multiprocessing
import os
import tempfile
import time

import numpy as np
import pytest

from minidist import Cluster, run
from minidist.errors import CommTimeout
from tests.strategies import arrays

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 3, 5, 100_000])
def test_in_place_out_of_place_and_mixed_give_the_same_bits(cluster, transport, size, n):
    def worker(group, n):
        values = arrays(n, seed=group.rank)
        fresh = group.all_reduce(values)
        shared = group.empty(n, "float64")
        shared[:] = values
        assert group.all_reduce(shared, out=shared) is shared
        other = group.empty(n, "float64")
        group.all_reduce(values, out=other)
        ordinary = np.empty(n)
        group.all_reduce(values, out=ordinary)
        mixed = group.empty(n, "float64") if group.rank % 2 else np.empty(n)
        mixed[:] = values
        group.all_reduce(mixed, out=mixed)
        part = group.empty((2, n), "float64")
        part[1] = values
        group.all_reduce(part[1], out=part[1])
        return [a.tobytes() for a in (fresh, shared, other, ordinary, mixed, part[1])]

    found = cluster(size, transport).run(worker, n)
    want = arrays(n, seed=0)
    for rank in range(1, size):
        want = want + arrays(n, seed=rank)
    assert {bits for row in found for bits in row} == {want.tobytes()}


@both
def test_what_a_rank_writes_after_an_all_reduce_does_not_reach_the_others(cluster, transport):
    def worker(group):
        x = group.empty(50_000, "float64")
        for step in range(40):
            x[:] = group.rank + step
            group.all_reduce(x, out=x)
            if not (x == sum(range(group.size)) + group.size * step).all():
                return step
            x[:] = np.nan  # at once, while slower ranks may still be busy
        return "well"

    assert cluster(4, transport).run(worker) == ["well"] * 4


@both
def test_empty_is_aligned_and_its_places_are_used_again(cluster, transport):
    def worker(group):
        arrays = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        aligned = all(a.ctypes.data % 64 == 0 for a in arrays)
        apart = not any(np.may_share_memory(a, b) for a in arrays for b in arrays if a is not b)
        top = group.endpoint.memory.top
        del arrays
        gc.collect()
        again = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        return aligned, apart, group.endpoint.memory.top == top, again[3].shape

    assert cluster(2, transport).run(worker) == [(True, True, True, (5, 7))] * 2


def test_a_view_keeps_its_place_and_more_than_a_region_is_a_memory_error(cluster):
    def worker(group):
        view = group.empty((4, 4))[1:, 1:]
        view[:] = 7
        gc.collect()
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
        gc.collect()
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


def test_where_there_is_no_memfd_an_unlinked_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(work, 2) == [(1.0, [0, 1])] * 2
    assert os.listdir(tmp_path) == []


def test_where_there_is_no_fork_server_ranks_are_spawned(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with Cluster(2) as ranks:
        assert type(ranks._ranks.processes[0]).__name__ == "SpawnProcess"
        assert ranks.run(work) == [(1.0, [0, 1])] * 2


@both
def test_a_rank_that_computes_while_others_wait_for_it_is_no_error(cluster, transport):
    def worker(group):
        if group.rank == 1:
            time.sleep(1.5)
        return float(group.all_reduce(np.ones(3))[0])

    assert cluster(3, transport).run(worker) == [3.0] * 3


def test_a_rank_that_waits_in_a_collective_says_so():
    def worker(group):
        if group.rank > 0:
            group.all_reduce(np.ones(3), label="w")
        time.sleep(30)

    with pytest.raises(CommTimeout, match="rank 1: waits in") as caught:
        run(worker, 3, timeout=1)
    assert "all_reduce(sum, float64, (3,), label='w') for rank 0 since" in str(caught.value)
    assert "rank 0: computes" in str(caught.value)
