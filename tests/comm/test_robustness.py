"""What broke once, or nearly: races, threads, aliases, and workers with bad manners."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from minidist import Cluster, run
from minidist.comm.fabric import Mailbox
from minidist.comm.local.processes import ctrl_c_waits
from minidist.comm.local.shared_memory import NOWHERE, size_class
from minidist.errors import RankDied, RankFailed
from tests.comm.test_cluster import gone
from tests.strategies import arrays

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


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


@both
def test_an_array_in_shared_memory_is_reduced_where_it_lies(cluster, transport):
    def worker(group):
        x, memory = group.empty(1000, "float64"), group.fabric.memory
        x[:] = 1
        group.all_reduce(x, out=x)
        places = memory.top, memory.kept
        group.all_reduce(x, out=x)
        return places == (memory.top, memory.kept) and x[0] == 4

    assert cluster(2, transport).run(worker) == [True] * 2


def test_arrays_of_ever_other_sizes_use_places_again(cluster):
    def worker(group):
        memory = group.fabric.memory
        begin = memory.top
        for i in range(2000):
            memory.empty(1_000_000 + 8 * i, "uint8")
        return memory.top - begin

    assert cluster(1).run(worker)[0] < 5_000_000
    for nbytes in [0, 1, 64, 65, 1000, 4097, 10**6, 10**9]:
        assert nbytes <= size_class(nbytes) <= max(64, 1.125 * nbytes + 64)
        assert size_class(nbytes) % 64 == 0


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


def test_one_large_array_does_not_slow_all_later_ones(cluster):
    """Freed pages that were given back no longer count as kept."""

    def worker(group):
        memory = group.fabric.memory
        group.empty(300 << 20, "uint8")[::4096] = 1
        kept = memory.kept
        group.empty(1 << 20, "uint8")
        return kept, memory.kept - kept, len(memory.bare)

    kept, more, bare = run(worker, 1)[0]
    assert kept < 1 << 20 and more == 1 << 20 and bare == 1


def test_runs_of_several_threads_on_one_cluster_take_turns():
    with Cluster(2) as ranks:
        found = {}

        def repeat(i):
            found[i] = [ranks.run(lambda g, i=i, n=n: (i, n, g.rank)) for n in range(20)]

        threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: [[(i, n, 0), (i, n, 1)] for n in range(20)] for i in range(2)}


def test_clusters_that_start_at_the_same_moment_leave_main_as_it_was():
    before = sys.modules["__main__"]
    threads = [threading.Thread(target=lambda: Cluster(2).close()) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is before


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e10])
def test_a_timeout_is_a_positive_number_of_seconds(cluster, timeout):
    with pytest.raises(ValueError, match="number of seconds above 0"):
        cluster(1, "thread").run(lambda group: 1, timeout=timeout)


def test_a_rank_that_is_a_process_starts_no_processes(cluster):
    with pytest.raises(RankFailed) as caught:
        cluster(1).run(lambda group: Cluster(2))
    said = "cannot start processes of its own; use transport='thread'"
    assert said in str(caught.value.__cause__)  # the traceback shows the lines above


def closes_stdout(group):
    sys.stdout.close()
    sys.stdout = None
    return "well"


class Unrestorable:
    def __reduce__(self):
        return explode, ()


def explode():
    raise RuntimeError("not here")


def test_workers_with_bad_manners():
    assert run(closes_stdout, 2) == ["well"] * 2
    with pytest.raises(RankFailed, match=r"cannot be restored(.|\n)*not here"):
        run(lambda group: Unrestorable(), 1)
    with pytest.raises(RankDied, match="signal 40"):
        run(lambda group: os.kill(os.getpid(), 40) or time.sleep(5), 1)


@linux
def test_a_rank_that_dies_but_leaves_a_child_is_noticed(tmp_path):
    def worker(group):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied, match="SIGKILL"):
        run(worker, 1, timeout=30)
    child = int((tmp_path / "child").read_text())
    assert not gone([child], within=0.1)  # the rank's connection is still open in it
    os.kill(child, signal.SIGKILL)


ORPHANS = """
import os, signal
import minidist
cluster = minidist.Cluster(2)
pids = cluster.run(lambda group: os.getpid())
os.write(1, f"{pids[0]} {pids[1]}\\n".encode())
import cloudpickle
cluster._ranks.submit(99, False, cloudpickle.dumps((lambda group: group.recv(1 - group.rank), ())))
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_a_caller_that_dies_right_after_it_gave_an_order_leaves_no_rank():
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, timeout=60)
        pids = [int(pid) for pid in done.stdout.split()]
        assert len(pids) == 2 and gone(pids)


@pytest.mark.parametrize("getter", ["the first thread", "another thread"])
def testctrl_c_waits_until_a_rank_is_started(getter):
    """The fork server dies of half an order; whichever thread gets the signal, it must wait."""
    after = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
        if getter == "the first thread":
            signal.raise_signal(signal.SIGINT)
        else:
            thread = threading.Thread(
                target=lambda: (
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT}),
                    signal.raise_signal(signal.SIGINT),
                )
            )
            thread.start()
            thread.join()
        after.append(sum(range(1000)))
    assert after and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, set())
