"""Ranks come up, work, fail, die, hang, are misused; and afterwards nothing is left."""

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from minidist import Cluster, nn, run
from minidist.backend import gpus
from minidist.comm.cluster import raise_first_failure
from minidist.comm.local.processes import ctrl_c_waits
from minidist.comm.local.worker import Report
from minidist.errors import CollectiveMismatch, CommError, CommTimeout, RankDied, RankFailed
from tests.comm.conformance import test_failures
from tests.comm.conformance.wrong_programs import OWN_GROUPS, refused, side_by_side

both = pytest.mark.parametrize("transport", ["process", "thread"])
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


def gone(pids, within=5.0):
    """Return whether all these processes are gone, or are so within some seconds.

    A zombie is gone: it has ended, and the system's first process takes its time to collect it.
    """
    deadline = time.monotonic() + within
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def group_gone(group, within=5.0):
    """Return whether a process group is gone, or is so within some seconds."""
    deadline = time.monotonic() + within
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if (pids := members(group)) and not any(map(is_alive, pids)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def members(group):
    """Return the processes of a process group, zombies too; none where there is no /proc."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc/self") else ():
        with suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if int(file.read().rsplit(")", 1)[1].split()[2]) == group:
                found.append(int(pid))
    return found


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not is_zombie(pid)


def is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:  # it has just been collected, or there is no /proc
        return False


def killed(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(np.ones(100_000))


def exiting(group):
    if group.rank == 1:
        os._exit(7)
    group.barrier()


FAILURES = [
    *test_failures.FAILURES,
    (killed, RankDied, r"rank 1 died without a report \(killed by SIGKILL\)"),
    (exiting, RankDied, r"rank 1 died without a report \(exit code 7\)"),
]


def is_shared(name):
    return name.startswith(("sem.", "psm_", "pym", "minidist"))


@linux
@pytest.mark.parametrize(
    "worker, error, message", FAILURES, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_failure_is_one_error_and_leaves_nothing_behind(worker, error, message):
    shared, files = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    with Cluster(2) as ranks:
        pids = ranks.run(lambda group: os.getpid())
        with pytest.raises(error, match=message):
            ranks.run(worker, timeout=2.5 if error is CommTimeout else 20)
        if error is not CommError:  # a lost message is found when all is over: the ranks are well
            assert gone(pids, within=0.5)
        pids += ranks.run(lambda group: os.getpid())  # usable again
        assert ranks.run(lambda group: float(group.all_reduce(np.ones(1))[0])) == [2.0, 2.0]
    assert gone(pids)
    begin = time.monotonic()
    while left := [name for name in set(os.listdir("/dev/shm")) - shared if is_shared(name)]:
        assert time.monotonic() - begin < 10, left  # another process's may be there for a moment
        time.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= files + 3  # the fork server's own connections


def test_a_death_counts_for_more_than_an_exception_and_that_for_more_than_a_mismatch():
    reports = {
        0: Report(error=CollectiveMismatch("in step 3"), traceback="a consequence"),
        1: Report(error=KeyError("x"), traceback="KeyError"),
        2: Report(exitcode=7),
    }
    with pytest.raises(RankDied, match="rank 2"):
        raise_first_failure(reports)
    del reports[2]
    with pytest.raises(RankFailed, match="rank 1"):
        raise_first_failure(reports)
    del reports[1]
    with pytest.raises(CollectiveMismatch, match="in step 3"):
        raise_first_failure(reports)


def test_a_rank_that_dies_between_runs_is_found_by_the_next():
    with Cluster(2) as ranks:
        pids = ranks.run(lambda group: os.getpid())
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankDied, match="rank 0") as caught:
            ranks.run(lambda group: group.barrier())
        assert (caught.value.rank, caught.value.exitcode) == (0, -signal.SIGKILL)
        assert ranks.run(lambda group: group.rank) == [0, 1]


REFUSED = [
    (lambda: Cluster(0), "whole number of ranks from 1, not 0"),
    (lambda: Cluster(2, "pigeon"), "unknown transport 'pigeon'; choose one of process, thread"),
    (lambda: Cluster(2, "thread", "abacus"), "unknown device 'abacus'"),
    (lambda: Cluster(2, interleaving=1), "only ranks that are threads can be interleaved"),
    (lambda: Cluster(124), r"at most 123.* or use transport='thread' \(at most 1000 ranks\)"),
    (lambda: Cluster(1001), r"at most 123(?!.*or use transport='thread')"),
    (lambda: Cluster(10**20, "thread"), f"{10**20} ranks.*at most 1000"),
    (lambda: run(abs, 1, transport="thread", timeout=0), "number of seconds above 0"),
    (lambda: run(abs, 1, transport="thread", timeout=float("nan")), "number of seconds above 0"),
    (lambda: run(abs, 1, transport="thread", timeout=1e10), "number of seconds above 0"),
]


def test_what_cannot_be_is_refused_before_anything_is_allocated():
    for call, message in REFUSED:
        files = len(os.listdir("/dev/fd"))
        with pytest.raises(ValueError, match=message):
            call()
        assert len(os.listdir("/dev/fd")) <= files, message


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(body))
    return [sys.executable, "-W", "error", str(path)]


def test_a_script_needs_no_main_guard_and_the_interpreter_has_nothing_to_say(tmp_path):
    command = script(
        tmp_path,
        """
        import numpy as np
        import minidist
        print("once")
        factor = 3.0
        def worker(group):
            return float(group.all_reduce(np.array(factor)))
        cluster = minidist.Cluster(2)            # never closed
        print(minidist.run(worker, 2), cluster.run(worker))
        """,
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("once\n[6.0, 6.0] [6.0, 6.0]\n", "", 0)


def test_a_failure_in_a_script_shows_the_remote_traceback_and_no_warning(tmp_path):
    command = script(
        tmp_path,
        """
        import minidist
        def worker(group):
            return 1 / (group.rank - 1)
        minidist.run(worker, 3)
        """,
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "RankFailed: rank 1 failed" in done.stderr
    assert "in worker" in done.stderr and "resource_tracker" not in done.stderr
    assert "Warning" not in done.stderr


SLEEPERS = """
    import os, sys, time
    import minidist
    def worker(group):
        os.write(1, f"{os.getpid()}\\n".encode())
        if group.rank == 0:
            time.sleep(60)  # while it does not wait, the others are in no deadlock
        group.recv((group.rank + 1) % group.size)
    os.write(1, f"{os.getpid()}\\n".encode())
    minidist.run(worker, 3)
    """


@linux
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_caller_is_stopped_every_rank_goes_with_it_and_no_file_is_left(tmp_path, sent):
    temporary = tempfile.mkdtemp()  # tmp_path is too long for a socket
    process = subprocess.Popen(
        script(tmp_path, SLEEPERS),
        env=os.environ | {"TMPDIR": temporary},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [int(process.stdout.readline()) for _ in range(4)]
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)  # as a terminal does
        else:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # this test leaves nothing either
        process.communicate()
        raise
    assert gone(pids)
    assert errors.count("KeyboardInterrupt") == (1 if sent == signal.SIGINT else 0), errors
    assert "resource_tracker" not in errors
    os.rmdir(temporary)  # which is empty


FORKS = """
    import os, sys
    import numpy as np
    import minidist
    def worker(group):
        return float(group.all_reduce(np.ones(())))
    def in_a_child(act):
        sys.stdout.flush()
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            try:
                print(act(), flush=True)
            except ValueError as error:
                print(error, flush=True)
            os._exit(0)
    for transport in ("process", "thread"):
        with minidist.Cluster(2, transport) as cluster:
            cluster.run(worker)
            in_a_child(lambda: minidist.run(worker, 2, transport=transport))
            in_a_child(lambda: cluster.run(worker))
            in_a_child(cluster.close)
            in_a_child(lambda: (cluster.close(), cluster.run(worker))[1])
            print(cluster.run(worker), "still")
    """


@linux
def test_a_forked_child_has_ranks_of_its_own_and_leaves_its_parents_alone(tmp_path):
    command = script(tmp_path, FORKS)
    command[2] = "ignore"  # Python 3.12 warns of every fork beside threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    refused = r"this cluster's ranks are those of process \d+, .* forked from it; make a Cluster .*"
    wanted = rf"(\[2.0, 2.0\]\n{refused}\nNone\n\[2.0, 2.0\]\n\[2.0, 2.0\] still\n){{2}}"
    assert re.fullmatch(wanted, done.stdout), done.stdout + done.stderr


def test_errors_can_be_pickled():
    for error in (RankFailed("text", 3), RankDied("text", 1, -9), CommTimeout("text")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


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


@pytest.mark.parametrize("getter", ["the first thread", "another thread"])
def test_ctrl_c_waits_until_a_rank_is_started(getter):
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


CHILDREN = """
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
        [sys.executable, "-c", CHILDREN, transport], capture_output=True, text=True, timeout=60
    )
    assert "[('parent', 0), ('parent', 0)] ['next', 'next']" in done.stdout, done
    assert "[('parent', 1), ('parent', 1)] ['next', 'next']" in done.stdout
    assert "[('parent', 3), ('parent', 3)] ['next', 'next']" in done.stdout
    assert done.stdout.count("child 0") == done.stdout.count("child 1") == 1
    assert done.stderr.count("OSError: of a child") == done.stderr.count("Error") == 2


COLLECTIVES = {
    "all_reduce": lambda g: g.all_reduce(np.ones(3)),
    "reduce": lambda g: g.reduce(np.ones(3)),
    "reduce_scatter": lambda g: g.reduce_scatter(np.ones(4)),
    "all_gather": lambda g: g.all_gather(np.ones(3)),
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
    assert f"{name} at {__name__.split('.')[-1]}.py:" in text


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


@linux
def test_the_open_files_that_ranks_need_are_there_before_they_start():
    refused = r"19 process ranks need \d+ open .* 64: enough for \d+ "
    refused += ".*use fewer ranks, .*ulimit -Hn.* transport='thread'"
    for transport, limits, message in (
        ("process", ("64", "256"), "True"),
        ("process", ("64", "64"), refused),
        ("thread", ("64", "64"), "True"),  # they need none
    ):
        command = [sys.executable, "-c", MANY, "19", transport, *limits]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert re.search(message, done.stdout) and "['well']" in done.stdout, done
        assert not done.stderr


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
            for _ in range(8):
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
        return group.fabric.memory.top, len(group.fabric.blocks)

    ranks = cluster(2, transport)
    ranks.run(worker)
    second = ranks.run(worker)
    assert [ranks.run(worker) for _ in range(3)] == [second] * 3


@pytest.mark.gpu
@both
def test_ranks_take_turns_on_the_gpus_or_share_the_one_that_is_named(transport):
    def worker(group):
        model = nn.MLP([2, 2]).to(group.device).flatten(group.empty)
        arrays = model.layers[0].flat.vector, group.empty(3), group.all_reduce(group.empty(1))
        return [array.device.id for array in arrays]

    last = gpus() - 1
    found = run(worker, 3, device="gpu", transport=transport)
    assert found == [[rank % gpus()] * 3 for rank in range(3)]
    found = run(worker, 3, device=f"gpu:{last}", transport=transport)
    assert found == [[last] * 3] * 3


@pytest.mark.gpu
def test_a_gpu_that_does_not_exist_is_an_error_before_any_rank_starts():
    with pytest.raises(ValueError, match=rf"'gpu:{gpus()}' does not exist: there (is|are) .*gpu:0"):
        Cluster(2, device=f"gpu:{gpus()}")
