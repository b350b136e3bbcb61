"""Ranks that wait permanently are told so, with a table; slow ones are left alone."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest

from minidist.errors import Deadlock
from tests.comm.conformance.wrong_programs import fails, quietly

HERE = os.path.basename(__file__)


def test_a_rank_that_returns_early_while_others_wait(ranks):
    def worker(group):
        if group.rank != 1:
            group.all_reduce(np.ones(3), label="w")

    row = r"rank 0: waits in all_reduce\(sum, float64, \(3,\), label='w'\) for rank 1 since"
    error = fails(ranks(3), worker, Deadlock, row, "rank 1: has finished")
    assert str(error).count(f" at {HERE}:") == 2


def early(group):
    if group.rank:
        group.reduce_scatter(group.empty(4), label="w")


def other_tag(group):
    group.recv(0, tag=2) if group.rank else group.send(np.ones(1), to=1, tag=1)


WAITS = {
    "arrays in shared memory": (
        early,
        [r"rank 2: waits in reduce_scatter\(.*label='w'\) for rank 0", "rank 0: has finished"],
    ),
    "a cycle of receives": (
        lambda group: group.recv((group.rank + 1) % group.size, tag=4),
        [rf"rank {r}: waits in recv\(tag=4\) for rank {(r + 1) % 3} since \d" for r in range(3)],
    ),
    "a tag that nobody sends": (other_tag, [r"rank 1: waits in recv\(tag=2\) for rank 0"]),
    "a collective beside a receive": (
        lambda group: group.barrier() if group.rank else group.recv(1),
        ["waits in barrier", r"waits in recv\(tag=0\)"],
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_ranks_that_wait_for_each_other_are_in_a_table(ranks, name):
    worker, rows = WAITS[name]
    fails(ranks(3), worker, Deadlock, *rows)


def test_a_rank_that_waits_for_any_of_several_of_which_none_will_send(ranks):
    def worker(group):
        if group.rank < 2:
            group.recv_any([r for r in range(3) if r != group.rank], tag=5)

    row = r"rank {}: waits in recv_any\(tag=5\) for ranks {}, 2 since \d"
    rows = row.format(0, 1), row.format(1, 0), "rank 2: has finished"
    assert str(fails(ranks(3), worker, Deadlock, *rows)).count(f" at {HERE}:") == 2


def test_every_thread_that_waits_has_a_row(processes):
    def worker(group):
        call = partial(group.recv, 1 - group.rank, 7)
        helper = threading.Thread(target=quietly, args=(call,), name="helper")
        helper.start()  # no daemon: while it does not wait yet, the rank computes
        group.recv(1 - group.rank, 8)

    error = fails(processes(2), worker, Deadlock, r"recv\(tag=7\) \(helper\) for rank 1")
    assert str(error).count("\n") == 4


def test_a_thread_of_the_caller_hides_no_deadlock(ranks):
    ended = threading.Event()
    caller = threading.Thread(target=ended.wait)  # as a logger may have
    caller.start()
    try:
        fails(ranks(2), lambda group: group.recv(1 - group.rank), Deadlock, "rank 1: waits in recv")
    finally:
        ended.set()
        caller.join()


# Right programs.


def test_one_that_may_still_send_is_enough_for_a_rank_that_waits_for_any(ranks):
    def worker(group):
        if group.rank == 0:
            return group.recv_any()[0]
        if group.rank == 1:
            time.sleep(0.6)  # six looks at what the ranks wait for
            group.send(np.ones(1), to=0)

    assert ranks(3).run(worker) == [1, None, None]


def test_a_rank_that_sleeps_or_computes_while_others_wait_is_no_deadlock(ranks):
    def worker(group):
        if group.rank == 0:
            time.sleep(0.3)  # three looks
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                sum(range(1000))
            group.send(np.ones(1), to=1)
        elif group.rank == 1:
            group.recv(0)
        group.barrier()
        return "well"

    assert ranks(3).run(worker) == ["well"] * 3


def test_a_thread_of_a_rank_that_will_send_is_no_deadlock(processes):
    def worker(group):
        def later():
            time.sleep(0.8)  # eight looks at what the ranks wait for
            group.send(np.ones(1), to=0)

        if group.rank == 1:
            thread = threading.Thread(target=quietly, args=(later,))
            thread.start()
            group.barrier()
            thread.join()
        else:
            group.recv(1)
            group.barrier()
        return "well"

    assert processes(2).run(worker) == ["well"] * 2
