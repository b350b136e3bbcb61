"""What a deadlock is; ranks that are stopped, and ranks that are killed."""

import os
import random
import signal
import threading

import numpy as np
import pytest

from minidist import Cluster
from minidist.comm import diagnosis
from minidist.comm.diagnosis import Row, Silence, Snapshot, is_deadlock
from minidist.errors import RankDied


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


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_rank_that_is_stopped_is_named_once_and_may_go_on(monkeypatch, capsys):
    def worker(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return float(group.all_reduce(np.ones(1))[0])

    def in_words(silence, pids):
        threading.Timer(2, os.kill, (pid, signal.SIGCONT)).start()  # after more looks
        return words(silence, pids)

    words = Silence.in_words
    monkeypatch.setattr(diagnosis, "SILENCE", 0.5)
    monkeypatch.setattr(Silence, "in_words", in_words)
    with Cluster(3) as ranks:
        pid = ranks.run(lambda group: os.getpid())[1]
        assert ranks.run(worker, timeout=60) == [3.0] * 3
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


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_nothing_and_the_cluster_works_right_after(count):
    moments = random.Random(count)
    with Cluster(3) as ranks:
        for _ in range(count):
            pids = ranks.run(lambda group: os.getpid())
            victim = moments.randrange(3)
            timer = threading.Timer(
                moments.uniform(0, 0.05), os.kill, (pids[victim], signal.SIGKILL)
            )
            timer.start()
            with pytest.raises(RankDied, match=f"rank {victim} died .*SIGKILL"):
                ranks.run(busy, timeout=20)
            timer.join()
            assert ranks.run(lambda g: float(g.all_reduce(np.ones(1))[0])) == [3.0] * 3
            for pid in pids:
                assert not os.path.exists(f"/proc/{pid}")
