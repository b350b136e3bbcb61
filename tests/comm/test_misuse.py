"""Threads, forks, open files: what a caller may get wrong is one clear error, at once."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress

import cloudpickle
import numpy as np
import pytest

from minidist import Cluster, run
from tests.comm.conformance.wrong_programs import OWN_GROUPS, refused, side_by_side

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")

COLLECTIVES = {
    "all_reduce": lambda g: g.all_reduce(np.ones(3)),
    "all_reduce with a label": lambda g: g.all_reduce(np.ones(3), label=str(g.rank)),
    "all_reduce in place": lambda g: g.all_reduce(x := np.ones(3), out=x),
    "all_reduce around a ring": lambda g: g.all_reduce(np.ones(3), algorithm="ring"),
    "all_reduce on two levels": lambda g: g.all_reduce(np.ones(3), algorithm="hierarchical"),
    "reduce": lambda g: g.reduce(np.ones(3)),
    "reduce_scatter": lambda g: g.reduce_scatter(np.ones(4)),
    "all_gather": lambda g: g.all_gather(np.ones(3)),
    "all_gather into an array": lambda g: g.all_gather(np.ones(3), out=np.ones(3 * g.size)),
    "gather": lambda g: g.gather(np.ones(3)),
    "broadcast": lambda g: g.broadcast(np.ones(3)),
    "scatter": lambda g: g.scatter([np.ones(3)] * g.size),
    "all_to_all": lambda g: g.all_to_all([np.ones(3)] * g.size),
    "barrier": lambda g: g.barrier(),
    "split": lambda g: g.split(0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_second_thread_in_a_collective_of_one_group_is_refused(cluster, name):
    def worker(group):
        if group.rank == 1:
            return group.recv(0)  # so the first thread of rank 0 is still in its barrier
        first = threading.Thread(target=lambda: side_by_side(group.barrier), daemon=True)
        first.start()
        while not group.fabric.mailbox.waits:
            time.sleep(0.001)
        with suppress(ValueError):
            COLLECTIVES[name](group)
        first.join()
        return "as if nothing had happened"

    text = refused(cluster(2, "thread"), worker, OWN_GROUPS)
    assert f"{name.split()[0]} at {__name__.split('.')[-1]}.py:" in text


FORKS = """
import os, sys, warnings
import minidist
warnings.simplefilter("ignore")  # of fork, in a process with threads

def forks(group, way):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        if way == "raises":
            raise OSError("of a child")
        if way == "exits":
            sys.exit(3)
        print(f"child {group.rank}", end=" ")
        return "child"
    os.close(writer)
    os.read(reader, 1)  # returns when the child has gone, which alone has the other end now
    return "parent", os.wait()[1] >> 8

with minidist.Cluster(2, sys.argv[1]) as ranks:
    for way in ("returns", "raises", "exits"):
        print(ranks.run(forks, way, timeout=8), ranks.run(lambda group: "next", timeout=8))
"""


@both
def test_a_child_that_a_worker_forks_leaves_when_it_returns_and_reports_nothing(transport):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, transport], capture_output=True, text=True, timeout=60
    )
    assert "[('parent', 0), ('parent', 0)] ['next', 'next']" in done.stdout, done
    assert "[('parent', 1), ('parent', 1)] ['next', 'next']" in done.stdout
    assert "[('parent', 3), ('parent', 3)] ['next', 'next']" in done.stdout
    assert done.stdout.count("child 0") == done.stdout.count("child 1") == 1
    assert done.stderr.count("OSError: of a child") == done.stderr.count("Error") == 2


def test_a_report_of_another_run_is_dropped():
    with Cluster(2) as ranks:
        ranks._ranks.submit(0, False, cloudpickle.dumps((lambda group: "of an earlier run", ())))
        assert ranks.run(lambda group: "of this run") == ["of this run"] * 2


MANY = """
import resource, sys
import minidist
size, transport, soft, hard = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with minidist.Cluster(1, transport) as few:  # starts the fork server, which keeps its limit
    try:
        with minidist.Cluster(size, transport) as ranks:
            print(ranks.run(lambda group: int(group.all_reduce(1)), timeout=60) == [size] * size)
    except ValueError as error:
        print(error)
    print(few.run(lambda group: "well"))
"""


REFUSED = r"31 process ranks need \d+ open .* 256: enough for \d+ "
REFUSED += ".*use fewer ranks, .*ulimit -Hn.* transport='thread'"


@pytest.mark.parametrize(
    "size, transport, soft, hard, message",
    [
        (19, "process", 64, 256, "True"),
        (31, "process", 256, 1024, "True"),
        (31, "process", 256, 256, REFUSED),
        (300, "thread", 64, 256, "True"),  # they need none
    ],
)
def test_the_open_files_that_ranks_need_are_there_before_they_start(
    size, transport, soft, hard, message
):
    done = subprocess.run(
        [sys.executable, "-c", MANY, *map(str, (size, transport, soft, hard))],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert re.search(message, done.stdout) and "['well']" in done.stdout, done
    assert not done.stderr


@pytest.mark.parametrize(
    "transport, message",
    [("process", "at most 123"), ("thread", "at most 1000")],
)
@pytest.mark.parametrize("size", [1001, 10**9, 99999999999999999999])
def test_more_ranks_than_there_can_be_are_refused_before_anything_is_allocated(
    transport, message, size
):
    gc.collect()  # of ranks that earlier tests have dropped
    files = len(os.listdir("/dev/fd"))
    with pytest.raises(ValueError, match=f"{size} ranks.*{message}"):
        Cluster(size, transport)
    assert len(os.listdir("/dev/fd")) == files


def test_threads_are_a_remedy_only_for_as_many_ranks_as_they_can_be():
    for size, remedy in ((124, True), (1000, True), (1001, False)):
        with pytest.raises(ValueError, match="at most 123") as error:
            Cluster(size)
        assert ("or use transport='thread' (at most 1000 ranks)" in str(error.value)) == remedy


@pytest.mark.slow
def test_as_many_ranks_as_there_can_be_work():
    with Cluster(123) as ranks:
        assert ranks.run(lambda group: int(group.all_reduce(1)), timeout=100) == [123] * 123


@linux
def test_rank_threads_release_their_files_and_addresses_as_soon_as_they_end():
    def worker(group):
        group.split(0).all_reduce(np.ones(3), algorithm="ring")
        kept = group.empty(1000, "float64")
        kept[:] = group.rank
        return kept

    def held():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:minidist" in line for line in maps)

    kept = run(worker, 2, transport="thread")
    gc.collect()
    gc.disable()
    before = held()
    try:
        for seed in (None, 1):
            for _ in range(25):
                run(worker, 2, transport="thread", interleaving=seed)
        assert held() <= before
    finally:
        gc.enable()
    assert [set(array.tolist()) for array in kept] == [{0.0}, {1.0}]
    del kept
    assert held() == (before[0] - 1, before[1] - 1)


@both
def test_a_run_takes_no_more_memory_than_the_one_before(cluster, transport):
    def worker(group):
        for tag in range(100):
            group.split(0).barrier()
            request = group.irecv(group.rank, tag)
            group.send(np.ones(1), to=group.rank, tag=tag)
            request.wait()
        assert not group._requests
        return group.fabric.memory.top, len(group.fabric.blocks)

    ranks = cluster(2, transport)
    ranks.run(worker)
    second = ranks.run(worker)
    assert [ranks.run(worker) for _ in range(3)] == [second] * 3
