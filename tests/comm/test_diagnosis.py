"""Wrong programs explain themselves; right ones, however slow, are left alone.

A wrong program runs with a timeout, so that a test ends soon also where the deadlock is not seen.
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minidist import Cluster
from minidist.comm import diagnosis
from minidist.comm.diagnosis import Row, Silence, Snapshot, is_deadlock
from minidist.errors import CollectiveMismatch, CommError, Deadlock, RankDied, RankFailed

both = pytest.mark.parametrize("transport", ["process", "thread"])
HERE = os.path.basename(__file__)


def fails(cluster, transport, size, worker, error, *patterns):
    """Run a wrong program: the error must come within 2 seconds, and say all this."""
    ranks = cluster(size, transport)
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        ranks.run(worker, timeout=8)
    assert caught.type is error and time.monotonic() - begin < 2.5  # the half: ranks start anew
    for pattern in patterns:
        caught.match(pattern)
    assert ranks.run(lambda g: float(g.all_reduce(np.ones(1))[0])) == [float(size)] * size
    return str(caught.value)


@both
def test_a_rank_that_returns_early_while_others_wait(cluster, transport):
    def worker(group):
        if group.rank != 1:
            group.all_reduce(np.ones(3), label="w")

    text = fails(
        cluster,
        transport,
        3,
        worker,
        Deadlock,
        r"rank 0: waits in all_reduce\(sum, float64, \(3,\), label='w'\) for rank 1 since",
        "rank 1: has finished",
    )
    assert text.count(f" at {HERE}:") == 2


def test_a_loop_that_waits_again_at_the_same_line_is_no_deadlock():
    """Ranks asked one after the other may each be found waiting, and again the next time."""

    def found(seconds_later):
        rows = [
            Row("MainThread", "barrier()", (other,), "train.py:12", since + seconds_later, 0.1)
            for other, since in [(1, 5.0), (0, 6.0)]
        ]
        return {rank: Snapshot((row,), False, 0, 0) for rank, row in enumerate(rows)}

    assert is_deadlock(found(0), found(0), set())
    assert not is_deadlock(found(0), found(0.5), set())


@both
def test_a_cycle_of_receives(cluster, transport):
    def worker(group):
        group.recv((group.rank + 1) % group.size, tag=4)

    row = r"rank {}: waits in recv\(tag=4\) for rank {} since \d"
    fails(cluster, transport, 3, worker, Deadlock, *[row.format(r, (r + 1) % 3) for r in range(3)])


@both
def test_a_tag_that_nobody_sends(cluster, transport):
    def worker(group):
        if group.rank == 0:
            group.send(np.ones(1), to=1, tag=1)
        else:
            group.recv(0, tag=2)

    fails(cluster, transport, 2, worker, Deadlock, r"rank 1: waits in recv\(tag=2\) for rank 0")


@both
def test_a_rank_that_waits_for_any_of_several_of_which_none_will_send(cluster, transport):
    def worker(group):
        if group.rank < 2:
            group.recv_any([r for r in range(3) if r != group.rank], tag=5)

    row = r"rank {}: waits in recv_any\(tag=5\) for ranks {}, 2 since \d"
    text = fails(
        cluster, transport, 3, worker, Deadlock, row.format(0, 1), row.format(1, 0), "has finished"
    )
    assert text.count(f" at {HERE}:") == 2


@both
def test_one_that_may_still_send_is_enough_for_a_rank_that_waits_for_any(cluster, transport):
    def worker(group):
        if group.rank == 0:
            return group.recv_any()[0]
        if group.rank == 1:
            time.sleep(0.6)  # six looks at what the ranks wait for
            group.send(np.ones(1), to=0)

    assert cluster(3, transport).run(worker) == [1, None, None]


@both
def test_a_collective_beside_a_receive(cluster, transport):
    def worker(group):
        group.barrier() if group.rank else group.recv(1)

    fails(cluster, transport, 2, worker, Deadlock, "waits in barrier", r"waits in recv\(tag=0\)")


@both
def test_two_collectives_of_one_shape_in_swapped_order(cluster, transport):
    def worker(group):
        for name in ("a", "b") if group.rank == 0 else ("b", "a"):
            group.all_reduce(np.ones(2), label=name)

    fails(cluster, transport, 2, worker, CollectiveMismatch, "label='a'", "label='b'", HERE)


@both
def test_a_message_that_nobody_received(cluster, transport):
    def worker(group):
        group.send(np.ones(1), to=0, tag=group.rank)

    fails(
        cluster,
        transport,
        2,
        worker,
        CommError,
        "1 from rank 0 to rank 0 with tag 0; 1 from rank 1",
    )


@both
def test_an_exception_counts_for_more_than_the_deadlock_that_follows(cluster, transport):
    def worker(group):
        if group.rank == 1:
            raise KeyError("the cause")
        group.barrier()

    fails(cluster, transport, 3, worker, RankFailed, "rank 1 failed", "the cause")


@both
@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_a_rank_that_sleeps_or_computes_while_others_wait_is_no_deadlock(
    cluster, transport, seconds
):
    def worker(group):
        if group.rank == 0:
            time.sleep(seconds / 2)
            end = time.monotonic() + seconds / 2
            while time.monotonic() < end:
                sum(range(1000))
            group.send(np.ones(1), to=1)
        elif group.rank == 1:
            group.recv(0)
        group.barrier()
        return "well"

    assert cluster(3, transport).run(worker) == ["well"] * 3


def test_a_thread_of_a_rank_that_will_send_is_no_deadlock(cluster):
    def worker(group):
        def later():
            time.sleep(0.8)  # eight looks at what the ranks wait for
            group.send(np.ones(1), to=0)

        if group.rank == 1:
            thread = threading.Thread(target=later)
            thread.start()
            group.barrier()
            thread.join()
        else:
            group.recv(1)
            group.barrier()
        return "well"

    assert cluster(2).run(worker) == ["well"] * 2


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_rank_that_is_stopped_is_named_once_and_may_go_on(monkeypatch, capsys):
    def worker(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return float(group.all_reduce(np.ones(1))[0])

    monkeypatch.setattr(diagnosis, "SILENCE", 0.5)
    with Cluster(3) as ranks:
        pid = ranks.run(lambda group: os.getpid())[1]
        timer = threading.Timer(4, os.kill, (pid, signal.SIGCONT))
        timer.start()
        assert ranks.run(worker) == [3.0] * 3
        timer.join()
    said = capsys.readouterr().err
    assert said.count(f"no answer from rank 1 (process {pid}) for 0.5 s") == 1, said
    assert "rank 0: waits in all_reduce" in said and "rank 2: waits in all_reduce" in said
    assert "The run goes on" in said and f"kill -CONT {pid}" in said and "timeout=" in said


def test_a_rank_that_does_not_answer_is_not_named_while_others_work_or_have_just_begun_to_wait():
    waits = Snapshot((Row("MainThread", "barrier()", (1,), "t.py:1", 1.0, 0.1),), False, 0, 0)
    again = Snapshot((Row("MainThread", "barrier()", (1,), "t.py:1", 2.0, 0.1),), False, 0, 0)
    computes = Snapshot((), True, 0, 0)

    def named(*looks, finished=()):
        """Return who is named in looks at {rank: snapshot} that are 20 seconds apart."""
        silence = Silence()
        return [silence.overdue(look, set(finished), 20.0 * i) for i, look in enumerate(looks)]

    nobody, stopped = set(), {0: waits, 1: None}
    assert named(stopped, stopped, stopped, stopped) == [nobody, nobody, {1}, nobody]
    assert named(stopped, stopped, {0: again, 1: None}, {0: again, 1: None}) == [nobody] * 4
    assert named(*[{0: computes, 1: None}] * 4) == [nobody] * 4
    assert named(*[{0: computes, 1: None}] * 3, finished=[0]) == [nobody, nobody, {1}]
    assert named(*[{0: waits, 1: None}] * 3, finished=[1]) == [nobody] * 3


def test_every_thread_that_waits_has_a_row(cluster):
    def worker(group):
        helper = threading.Thread(target=group.recv, args=(1 - group.rank, 7), name="helper")
        helper.start()  # no daemon: while it does not wait yet, the rank computes
        group.recv(1 - group.rank, 8)

    text = fails(cluster, "process", 2, worker, Deadlock, r"recv\(tag=7\) \(helper\) for rank 1")
    assert text.count("\n") == 4


# Random programs of a few operations with one random defect: the verdict must be right.

OPERATIONS = ["all_reduce", "broadcast", "ring", "barrier", "pass_on"]


def play(group, program, defect):
    """Carry out a program; the `culprit` does step `at` in its own way, or leaves."""
    at, culprit, kind = defect
    for step, operation in enumerate(program):
        wrong = step == at and group.rank == culprit
        x = np.arange(4.0) + step
        if wrong and kind == "leave":
            return
        if wrong and kind == "raise":
            raise ZeroDivisionError("defect")
        if wrong and kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong and kind == "shape":
            x = np.arange(5.0)
        if wrong and kind == "other":
            group.all_gather(x, label="other")
        elif operation == "all_reduce":
            group.all_reduce(x, label=str(step))
        elif operation == "ring":
            group.all_reduce(x, algorithm="ring")
        elif operation == "broadcast":
            group.broadcast(x, root=step % group.size)
        elif operation == "barrier":
            group.barrier()
        else:
            group.send(x, to=(group.rank + 1) % group.size, tag=step)
            group.recv((group.rank - 1) % group.size, tag=step + (wrong and kind == "tag"))


def verdict(program, at, kind, size):
    """Say what the error must be; None if the defect does no harm."""
    collective = program[at] != "pass_on"
    if kind in ("raise", "die"):
        return {"raise": RankFailed, "die": RankDied}[kind]
    if kind == "leave":
        return Deadlock  # the others need it in this very step, whatever it is
    if kind == "tag":
        return None if collective else Deadlock
    if kind == "shape" and program[at] in ("broadcast", "barrier", "pass_on"):
        return None
    return CollectiveMismatch if collective else None


@pytest.mark.parametrize("transport, examples", [("thread", 15), ("process", 8)])
def test_the_verdict_on_random_programs_with_one_defect_is_right(cluster, transport, examples):
    kinds = ["leave", "raise", "shape", "other", "tag", *(["die"] * (transport == "process"))]

    @settings(max_examples=examples, phases=[Phase.generate])  # small as they are: each takes long
    @given(
        program=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=5),
        size=st.integers(2, 4),
        kind=st.sampled_from(kinds),
        data=st.data(),
    )
    def check(program, size, kind, data):
        at = data.draw(st.integers(0, len(program) - 1))
        culprit = data.draw(st.integers(0, size - 1))
        if kind == "other" and program[at] == "pass_on":
            return  # then what follows decides; the enumerated tests have such cases
        want = verdict(program, at, kind, size)
        ranks = cluster(size, transport)
        if want is None:
            ranks.run(play, program, (at, culprit, kind), timeout=8)
            return
        with pytest.raises(CommError) as caught:
            ranks.run(play, program, (at, culprit, kind), timeout=8)
        assert caught.type is want, (caught.type, want)

    check()


def busy(group):
    """Communicate in every way for a long time; tell the caller when it has begun."""
    x, shared = np.ones(20_000), group.empty(50_000)
    shared[:] = 0
    group.barrier()
    for _ in range(100_000):
        group.all_reduce(shared, out=shared)
        group.all_reduce(x)
        group.send(x, to=(group.rank + 1) % group.size)
        group.recv((group.rank - 1) % group.size)
        group.barrier()
        group.all_reduce(x[:10], algorithm="ring")


def kill_at_random_moments(count, seed):
    """Kill a random rank at a random moment, again and again, in one Cluster."""
    moments = random.Random(seed)
    with Cluster(3) as ranks:
        for _ in range(count):
            pids = ranks.run(lambda group: os.getpid())
            victim = moments.randrange(3)
            timer = threading.Timer(
                moments.uniform(0, 0.05), os.kill, (pids[victim], signal.SIGKILL)
            )
            timer.start()
            begin = time.monotonic()
            with pytest.raises(RankDied, match=f"rank {victim} died .*SIGKILL"):
                ranks.run(busy)
            timer.join()
            assert time.monotonic() - begin < 2
            assert ranks.run(lambda g: float(g.all_reduce(np.ones(1))[0])) == [3.0] * 3
            for pid in pids:
                assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_kills_at_random_moments_leave_nothing_and_the_cluster_works_right_after():
    kill_at_random_moments(20, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_two_hundred_kills():
    kill_at_random_moments(200, seed=1)
