"""Memory on GPUs that all ranks see; on the stand-in, whose processes map each other's memory."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidist import Cluster, run
from minidist.backend import device_module, on_gpu, to_device, to_host
from minidist.comm.local import device_memory

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("transport", ["process", "thread"])


@pytest.fixture
def stand_in():
    """Leave out a test that asks the stand-in, where there is a GPU."""
    if not hasattr(device_module("gpu").cuda, "order"):
        pytest.skip("this asks the stand-in")


@both
def test_places_are_aligned_and_used_again_by_the_same_stream_only(cluster, transport):
    def worker(group):
        memory, cuda = group.fabric.device_memory, device_module("gpu").cuda
        x = group.empty(1000, "float32")
        first, place = x.data.ptr, memory.offset_of(x)
        inside = [memory.offset_of(part) - place for part in (x[:10], x[7:], x[999:])]
        apart = [memory.offset_of(y) for y in (x[::2], x.copy(), np.ones(3), None)]
        del x
        gc.collect()
        with cuda.Stream(non_blocking=True):
            other = group.empty(1000, "float32").data.ptr
        again = group.empty(990, "float32").data.ptr
        return first % 512, inside, set(apart), first == other, first == again

    found = cluster(2, transport, "gpu").run(worker)
    assert found == [(0, [0, 28, 3996], {device_memory.DEVICE}, False, True)] * 2


@both
def test_a_rank_allocates_chunks_as_it_needs_them(transport):
    """Small arrays share one; a large one has its own, which the others open when they meet it."""

    def worker(group):
        memory, sizes = group.fabric.device_memory, []
        kept = [group.empty(n, "uint8") for n in (1, 10_000, 20 << 20, 3)]
        for chunk in memory.chunks:
            sizes.append(chunk.size >> 20)
        total = []
        for x in kept[2:]:
            x[...] = group.rank + 1
            total.append(int(to_host(group.all_reduce(x, out=x)[-1])))
        return sizes, total

    with Cluster(2, transport, "gpu") as ranks:
        assert ranks.run(worker) == [([2, 64, 20], [3, 3])] * 2


@both
def test_arrays_on_the_host_and_on_gpus_meet_on_the_host(cluster, transport):
    def worker(group):
        x = np.arange(6.0) * (group.rank + 1)
        mine = to_device(x, "gpu") if group.rank else x
        shared = group.empty(6, "float64") if group.rank else x.copy()
        shared[...] = mine
        sums = [group.all_reduce(mine), group.all_reduce(shared, out=shared)]
        return [to_host(s).tolist() for s in sums], [*map(on_gpu, sums)], group.ledger.total

    three = [3.0 * i for i in range(6)]
    for rank, (sums, kinds, moved) in enumerate(cluster(2, transport, "gpu").run(worker)):
        assert sums == [three, three] and moved == 48 + 48
        assert kinds == [bool(rank)] * 2


def ranks_without(lacks: str, transport: str, device: str) -> subprocess.CompletedProcess:
    """Return a run of two ranks, on a machine that lacks what a variable=value says."""
    program = f"""
import minidist, numpy as np
from minidist.backend import to_device, to_host
def worker(group):
    x, y = group.empty(5, "float64"), to_device(np.full(5, 2.0), "gpu")
    x[...] = group.rank
    group.all_reduce(x, out=x)
    return to_host(x + group.all_reduce(y)).tolist(), group.fabric.device_memory is not None
with minidist.Cluster(2, {transport!r}, {device!r}) as ranks:
    for _ in range(2):
        (first, shared), (second, too) = ranks.run(worker)
        assert first == second == [5.0] * 5 and shared == too
        print(shared)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | dict([lacks.split("=")]),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done


IPC, PEERS = "STRICT_IPC_REFUSED=1", "STRICT_NO_PEER_ACCESS=all"
ONE_WAY = "STRICT_NO_PEER_ACCESS=1>0"


@pytest.mark.parametrize(
    ("lacks", "transport", "device", "rank", "why"),
    [
        (IPC, "process", "gpu:0", 0, "cudaErrorMapBufferObjectFailed"),
        (PEERS, "process", "gpu", 0, "cudaErrorPeerAccessUnsupported"),
        (PEERS, "thread", "gpu", 0, "GPU 0 cannot use the memory of GPU 1"),
        (ONE_WAY, "process", "gpu", 1, "cudaErrorPeerAccessUnsupported"),  # rank 0 has opened it
    ],
)
def test_ranks_that_cannot_share_memory_reduce_on_the_host_and_say_why(
    stand_in, lacks, transport, device, rank, why
):
    done = ranks_without(lacks, transport, device)
    assert done.stdout.split() == ["False"] * 2
    (line,) = done.stderr.splitlines()  # one for all ranks and runs
    start = f"minidist: arrays on GPUs are reduced on the host, because rank {rank} cannot"
    assert line.startswith(start) and why in line


def without_waiting(group):
    """Reduce in shared memory without waiting for the GPU before the others are told."""
    group.fabric.device_memory.synchronize = lambda: None
    x = group.empty(1000, "float64")
    x[...] = group.rank + 1
    return to_host(group.all_reduce(x, out=x)).tolist()


def test_what_a_rank_has_not_waited_for_the_others_do_not_see(stand_in):
    """Were the stand-in not strict, the tests above would show nothing."""
    found = run(without_waiting, 2, device="gpu:0")
    assert any(ranks != [3.0] * 1000 for ranks in found)
