"""Memory that all ranks see, and the all_reduce in it."""

import gc
import multiprocessing
import os
import resource
import tempfile
import threading
from unittest.mock import Mock

import numpy as np
import pytest

from minidist import Cluster, run
from minidist.comm.local.shared_memory import SharedMemory, create_file

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@both
def test_threads_of_a_rank_reduce_in_groups_of_their_own(cluster, transport):
    """Each call has a stage of its own."""

    def worker(group):
        groups = [group.split(0) for _ in range(3)]

        def work(k):
            for step in range(10):
                x = np.full(50_000, group.rank + k + 100 * step)
                wrong[k] += not (groups[k].all_reduce(x) == 2 * (k + 100 * step) + 1).all()

        wrong = [0] * 3
        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    assert cluster(2, transport).run(worker) == [[0] * 3] * 2


@both
def test_a_stage_is_given_back(cluster, transport):
    def worker(group):
        memory = group.fabric.memory
        group.all_reduce(np.ones(SharedMemory.stage // 4))
        top, kept = memory.top, memory.kept
        for _ in range(5):
            group.all_reduce(np.ones(SharedMemory.stage // 2))
        return top == memory.top, kept == memory.kept

    assert cluster(2, transport).run(worker) == [(True, True)] * 2


@both
def test_empty_is_aligned_and_its_places_are_used_again(cluster, transport):
    def worker(group):
        arrays = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        aligned = all(a.ctypes.data % 64 == 0 for a in arrays)
        apart = not any(np.may_share_memory(a, b) for a in arrays for b in arrays if a is not b)
        top = group.fabric.memory.top
        del arrays
        gc.collect()
        again = [group.empty(shape) for shape in [(), 0, 3, (5, 7), 1000]]
        return aligned, apart, group.fabric.memory.top == top, again[3].shape

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
    with Cluster(2) as ranks:
        assert type(ranks._ranks.processes[0]).__name__ == "SpawnProcess"
        assert ranks.run(work) == [(1.0, [0, 1])] * 2
