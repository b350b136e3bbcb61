"""What a caller may get wrong is one clear error, at once, on every transport."""

import functools
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
from minidist.errors import CollectiveMismatch, RankFailed

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")


def side_by_side(*calls):
    """Let each call run in a thread of its own; join them. What they raise is lost."""

    def quietly(call):
        with suppress(BaseException):
            call()

    threads = [threading.Thread(target=quietly, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def refused(cluster, transport, worker, message, size=2):
    """Run a wrong program: it fails with this ValueError, soon, and the next run is well."""
    ranks, begin = cluster(size, transport), time.monotonic()
    with pytest.raises(RankFailed, match=message) as caught:
        ranks.run(worker, timeout=8)
    assert isinstance(caught.value.__cause__, ValueError) and time.monotonic() - begin < 4
    assert ranks.run(lambda g: float(g.all_reduce(np.ones(1))[0])) == [float(size)] * size
    return str(caught.value)


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
OWN_GROUPS = r"give each thread a group of its own: group.split\(0\)"


@both
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_second_thread_in_a_collective_of_one_group_is_refused(cluster, transport, name):
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

    text = refused(cluster, transport, worker, OWN_GROUPS)
    assert f"{name.split()[0]} at {__name__.split('.')[-1]}.py:" in text


PAIRS = {
    **{name: [COLLECTIVES[name]] * 2 for name in ("all_reduce", "barrier", "split")},
    "around a ring": [COLLECTIVES["all_reduce around a ring"]] * 2,
    "two labels": [lambda g: g.barrier(label="a"), lambda g: g.barrier(label="b")],
}


@both
@pytest.mark.parametrize("name", PAIRS)
def test_two_threads_of_every_rank_in_one_group_neither_hang_nor_mix(cluster, transport, name):
    def worker(group):
        def repeat(call):
            for _ in range(2000):
                call(group)

        side_by_side(*[lambda call=call: repeat(call) for call in PAIRS[name]])

    refused(cluster, transport, worker, OWN_GROUPS)


def test_what_follows_from_two_threads_in_one_group_does_not_hide_it(cluster):
    def worker(group):
        found = {}

        def repeat(i):
            found[i] = [group.all_reduce(np.ones(3)) for _ in range(2000)]

        side_by_side(lambda: repeat(0), lambda: repeat(1))
        return found[0], found[1]  # KeyError: neither has come to its end

    refused(cluster, "process", worker, OWN_GROUPS)


@both
def test_threads_that_take_turns_in_a_group_and_messages_beside_them_are_legal(cluster, transport):
    def worker(group):
        other, found = 1 - group.rank, []

        def chat(tag):
            for i in range(50):
                group.send(np.array(i), to=other, tag=tag)
                assert int(group.recv(other, tag=tag)) == i

        def reduce(i):
            found.append(float(group.all_reduce(np.array(float(i)))))

        talkers = [threading.Thread(target=chat, args=(tag,)) for tag in (1, 2)]
        for talker in talkers:
            talker.start()
        for i in range(10):
            thread = threading.Thread(target=reduce, args=(i,))
            thread.start()
            thread.join()
        for talker in talkers:
            talker.join()
        return found

    want = [2.0 * i for i in range(10)]
    assert cluster(2, transport).run(worker, timeout=20) == [want, want]


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


@pytest.mark.parametrize(
    "size, transport, soft, hard, message",
    [
        (19, "process", 64, 256, "True"),
        (31, "process", 256, 1024, "True"),
        (31, "process", 256, 256, r"31 process ranks need \d+ open .* 256: enough for \d+ "),
        (31, "process", 256, 256, "use fewer ranks, .*ulimit -Hn.* transport='thread'"),
        (90, "thread", 64, 256, "True"),
        (200, "thread", 64, 256, r"200 thread ranks need \d+ open files, .* 256: enough for \d+ "),
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


LATE = {
    "barrier": lambda group, sub: group.barrier(),
    "all_reduce": lambda group, sub: sub.all_reduce(np.ones(3)),
    "ring": lambda group, sub: sub.all_reduce(np.ones(3), algorithm="ring"),
    "recv": lambda group, sub: group.recv(1),
    "recv_any": lambda group, sub: sub.recv_any(),
    "send": lambda group, sub: time.sleep(0.2) or group.send(np.ones(3), to=1),
}


@both
@pytest.mark.parametrize("name", LATE)
def test_a_thread_that_outlives_its_run_is_stopped_and_disturbs_no_later_one(
    cluster, transport, name
):
    def first(group):
        sub = group.split(0)

        def late():
            while True:
                LATE[name](group, sub)

        if group.rank == 0:
            target = functools.partial(side_by_side, late)
            threading.Thread(target=target, name="left over", daemon=True).start()
            time.sleep(0.05)

    def second(group):
        deadline = time.monotonic() + 3
        while any(thread.name == "left over" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        filled = [group.empty(100) for _ in range(100)]  # where the old boards were
        for array in filled:
            array[:] = group.rank
        sums = {float(group.split(0).all_reduce(np.array(1.0))) for _ in range(20)}
        return sums, {float(array[0]) for array in filled}

    ranks = cluster(2, transport)
    ranks.run(first, timeout=8)
    assert ranks.run(second, timeout=8) == [({2.0}, {0.0}), ({2.0}, {1.0})]


@both
def test_a_group_of_an_earlier_run_is_refused(cluster, transport):
    def keep(group):
        threading.main_thread().kept = group

    def use(group):
        threading.main_thread().kept.barrier()

    ranks = cluster(1, transport)
    ranks.run(keep)
    with pytest.raises(RankFailed, match="this group is of a run that has ended") as caught:
        ranks.run(use, timeout=8)
    assert caught.value.rank == 0 and ranks.run(lambda group: "well") == ["well"]


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


masked = np.ma.masked_array([1.0, 2.0], [True, False])
WRONG = [
    (lambda g: g.split(0, key=0.9), "a key is a whole number, not 0.9"),
    (lambda g: g.split(0, key="a"), "a key is a whole number, not 'a'"),
    (lambda g: g.split(2**63), f"a color is a whole number or None of 64 bits, not {2**63}"),
    (lambda g: g.split(0, key=-(2**63) - 1), "a key is a whole number of 64 bits, not -9"),
    (lambda g: g.split(0.0), "a color is a whole number or None, not 0.0"),
    (lambda g: g.recv(0, tag=1.0), "a tag is a whole number, not 1.0"),
    (lambda g: g.recv(source=0.0), "source is a whole number, not 0.0"),
    (lambda g: g.irecv(source="0"), "source is a whole number, not '0'"),
    (lambda g: g.recv_any([0, None]), "source is a whole number, not None"),
    (lambda g: g.recv_any(0), "sources are a list, not 0"),
    (lambda g: g.send(np.ones(1), to=None), "to is a whole number, not None"),
    (lambda g: g.broadcast(np.ones(1), root=1.5), "root is a whole number, not 1.5"),
    (lambda g: g.gather(np.ones(1), root=None), "root is a whole number, not None"),
    (lambda g: g.gather(np.ones(1), axis=0.5), "an axis is a whole number, not 0.5"),
    (lambda g: g.all_gather(np.ones(1), axis=None), "an axis is a whole number"),
    (lambda g: g.reduce_scatter(np.ones(3), [1.5, 1.5]), "a size is a whole number"),
    (lambda g: g.reduce_scatter(np.ones(3), 3), "sizes are a list, not 3"),
    (lambda g: g.all_to_all(np.float64(3)), "arrays are a list, not "),
    (lambda g: g.scatter(3, root=g.rank), "pieces are a list, not 3"),
    (lambda g: g.all_reduce(np.ones(1), op=["sum"]), r"unknown reduction \['sum'\]"),
    (lambda g: g.all_reduce(np.ones(1), algorithm=[]), r"unknown algorithm \[\]"),
    (
        lambda g: g.all_reduce(np.ones(1), out=[0.0]),
        r"out must be an array, not list; use group.empty",
    ),
    (
        lambda g: g.all_gather(np.ones(1), out=[0.0]),
        r"out must be an array, not list; use group.empty",
    ),
    (lambda g: g.all_reduce(np.ones(1), out=np.broadcast_to(0.0, 1)), "out is read-only"),
    (lambda g: g.send(masked, to=0), r"use .filled\(\), .compressed\(\) or .data"),
    (lambda g: g.all_reduce(masked), r"use .filled\(\), .compressed\(\) or .data"),
    (lambda g: g.all_reduce(np.ones(2), out=masked), r"use .filled\(\), .compressed\(\) or .data"),
    (lambda g: g.barrier(label=["a"]), r"a label is a string or None, not \['a'\]"),
    (lambda g: g.all_reduce(np.ones(1), label=3), "a label is a string or None, not 3"),
    (lambda g: g.all_gather(np.ones(1), out=np.ones(2), label=3), "a label is a string or None"),
    (lambda g: g.empty(3, object), "arrays of object do not travel between ranks; use numbers"),
    (lambda g: g.empty(3, "U5"), "arrays of <U5 do not travel between ranks; use numbers"),
    (lambda g: g.empty(3, "float23"), "'float23' is not a dtype"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(5)), "part of out"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(2), sizes=[2, 0]), "part of out"),
    (lambda g: g.all_gather(np.zeros(1), out=np.zeros(2), sizes=[2, 1]), "do not cut 2 rows"),
    (lambda g: g.all_gather(np.zeros(1), sizes=[1, 1]), "give out, or no sizes"),
    (lambda g: g.all_gather(np.zeros((1, 2)), out=np.zeros((2, 2))), "part of out"),
    (lambda g: g.all_gather(np.zeros(2, "float32"), out=np.zeros(4)), "part of out"),
    (lambda g: g.all_gather(np.zeros((2, 1)), out=np.zeros(4)), "part of out"),
    (lambda g: g.reduce_scatter(g.empty(4), [1, 2]), "do not cut 4 rows into 2 pieces"),
    (lambda g: g.reduce_scatter(g.empty(4), [5, -1]), "do not cut 4 rows into 2 pieces"),
    (lambda g: g.send(np.ones(1), to=2), "to=2 is no rank of a group of 2; use 0 to 1"),
    (lambda g: g.recv(-1), "source=-1 is no rank"),
    (lambda g: g.recv_any([0, 2]), "source=2 is no rank of a group of 2"),
    (lambda g: g.recv_any([]), "recv_any needs a source"),
    (lambda g: g.recv_any(tag="a"), "a tag is a whole number, not 'a'"),
    (lambda g: g.broadcast(np.ones(1), root=5), "root=5 is no rank"),
    (lambda g: g.all_reduce(np.ones(1), op="mean"), "unknown reduction 'mean'"),
    (lambda g: g.all_reduce(np.ones(1), algorithm="magic"), "unknown algorithm 'magic'"),
    (lambda g: g.all_reduce("text"), "only arrays travel between ranks, not str"),
    (lambda g: g.all_reduce(np.array([None])), "arrays of object do not travel"),
    (
        lambda g: g.all_reduce(np.ones(2), out=np.ones(3)),
        r"out is float64\[3\], x is float64\[2\]",
    ),
    (lambda g: g.all_gather(np.ones(2), axis=1), r"axis 1 does not exist .* \[2\]"),
    (lambda g: g.all_gather(np.array(1.0)), "axis 0 does not exist"),
    (lambda g: g.all_to_all([np.ones(1)]), "one array per rank: 2, got 1"),
    (lambda g: g.all_to_all([np.ones(1), np.ones(1, "f4")]), "one dtype, got float64, float32"),
    (lambda g: g.scatter([np.ones(1)], root=g.rank), "one piece per rank on the root: 2"),
]


def test_what_a_caller_can_get_wrong_is_a_value_error_that_shows_it(cluster):
    def worker(group, wrong):
        try:
            wrong(group)
        except ValueError as error:
            return str(error)

    for wrong, message in WRONG:
        for said in cluster(2, "thread").run(worker, wrong, timeout=8):
            assert said is not None and re.search(message, said), (message, said)


def test_recv_any_does_not_take_what_belongs_to_a_request(cluster):
    def worker(group):
        group.send(np.array(group.rank), to=0)
        if group.rank == 0:
            request = group.irecv(1)
            try:
                group.recv_any([0, 1])
            except ValueError as error:
                return str(error), int(request.wait()), group.recv_any()[0]

    message, first, second = cluster(2, "thread").run(worker)[0]
    assert "rank 1 with tag 0 belongs to a request of irecv" in message
    assert (first, second) == (1, 0)


def test_whole_numbers_of_every_kind_are_taken(cluster):
    def worker(group):
        last = group.split(np.int8(-3), key=np.uint64(9 - group.rank)).rank
        group.send(np.matrix([[1, 2]]), to=np.uint8(group.rank), tag=np.array(2**62))
        low = group.split(-(2**63), key=2**63 - 1).rank
        return last, group.recv(group.rank, tag=2**62).tolist(), low

    assert cluster(2).run(worker) == [(1, [[1, 2]], 0), (0, [[1, 2]], 1)]


@both
def test_labels_that_differ_late_do_not_look_the_same(cluster, transport):
    def worker(group, long):
        group.all_reduce(np.ones(3), label="ä" * long + str(group.rank))

    for long in (460, 600, 10_000):
        with pytest.raises(CollectiveMismatch) as caught:
            cluster(2, transport).run(worker, long)
        _, first, second = str(caught.value).splitlines()
        assert first.removeprefix("  rank 0") != second.removeprefix("  rank 1")
        assert all("all_reduce(sum, float64, (3,), label='ää" in row for row in (first, second))
        assert all(re.search(r" at test_misuse.py:\d+$", row) for row in (first, second))
        assert len(first) < 550
