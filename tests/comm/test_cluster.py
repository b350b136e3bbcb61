"""Ranks come up, work, fail, die, hang; and afterwards nothing is left."""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress

import numpy as np
import pytest

from minidist import Cluster, nn, run
from minidist.backend import gpus
from minidist.comm.cluster import raise_first_failure
from minidist.comm.local.worker import Report
from minidist.errors import CollectiveMismatch, CommError, CommTimeout, RankDied, RankFailed
from tests.comm.conformance import test_failures

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


def test_an_error_has_the_rank_that_died_and_its_exit_code():
    with pytest.raises(RankDied) as caught:
        run(killed, 2)
    assert caught.value.rank == 1 and caught.value.exitcode == -signal.SIGKILL


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
        with pytest.raises(RankDied, match="rank 0"):
            ranks.run(lambda group: group.barrier())
        assert ranks.run(lambda group: group.rank) == [0, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "whole number of ranks from 1, not 0"),
        ((2, "pigeon"), "unknown transport 'pigeon'; choose one of process, thread"),
        ((2, "tcp"), "unknown transport 'tcp'"),
        ((2, "thread", "abacus"), "unknown device 'abacus'"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Cluster(*arguments)


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


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["process", "thread"])
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
