"""A Cluster: results in rank order; a failure is one error, and the next run works."""

import os
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from minidist.errors import CommError, CommTimeout, RankFailed
from tests.comm.conformance.machines import lacks
from tests.comm.conformance.wrong_programs import fails


def test_this_computer_has_every_machine(machine):
    if reason := lacks(machine):
        pytest.skip(f"{machine}: no conformance test runs: {reason}")


def test_results_come_back_in_rank_order_with_arguments_by_value(ranks):
    scale = 10  # a closure travels with the worker

    def worker(group, array, more):
        array += group.rank  # each rank has its own copy
        return group.rank, group.size, (array * scale).tolist(), more

    array = np.zeros(2)
    found = ranks(3).run(worker, array, "more")
    assert found == [(r, 3, [10.0 * r] * 2, "more") for r in range(3)]
    assert array.tolist() == [0, 0]


def test_a_cluster_runs_again_and_again(ranks):
    pids = ranks(2).run(lambda group: os.getpid())
    for _ in range(5):
        assert ranks(2).run(lambda group: float(group.all_reduce(np.ones(1))[0])) == [2.0, 2.0]
    assert ranks(2).run(lambda group: os.getpid()) == pids


def test_group_empty_is_on_the_device_of_the_run(ranks):
    def worker(group):
        array = group.empty((3, 4), "float32")
        return group.device, array.shape, str(array.dtype)

    assert ranks(1).run(worker) == [(ranks.device, (3, 4), "float32")]


def test_blas_threads_are_shared_out_among_the_ranks(ranks):
    def worker(group):
        from threadpoolctl import threadpool_info

        np.ones((64, 64)) @ np.ones((64, 64))
        blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]  # not PyTorch's
        return [pool["num_threads"] for pool in blas]

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # Ranks that are threads would find what conftest.py sets. A process of MPI may begin to work
    # for the first one before it comes here itself.
    with nullcontext() if ranks.transport.startswith("mpi") else threadpool_limits(cores):
        for threads in ranks(4).run(worker):
            assert threads and all(n <= max(1, cores // 4) for n in threads)


def failing(group):
    if group.rank == 1:
        raise KeyError("lost")
    group.recv(1)


def hanging(group):
    if group.rank == 0:
        time.sleep(4)  # a rank that is a thread cannot be stopped earlier
    group.recv(0, tag=5)


def talking(group):
    group.send(np.ones(3), to=0, tag=9)


class Odd(Exception):
    def __init__(self, needed, also_needed):
        super().__init__(f"{needed} {also_needed}")


def odd(group):
    raise Odd("cannot be", "pickled")


FAILURES = [
    (failing, RankFailed, "rank 1 failed(.|\n)*KeyError: 'lost'"),
    (hanging, CommTimeout, r"rank 0: computes\n  rank 1: waits in recv\(tag=5\) for rank 0 since"),
    (talking, CommError, "nobody received: 1 from rank 0 to rank 0 with tag 9; 1 from rank 1"),
    (odd, RankFailed, "Odd: cannot be pickled"),
]


@pytest.mark.parametrize(
    "worker, error, message", FAILURES, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_failure_is_one_error_and_the_ranks_work_after_it(ranks, worker, error, message):
    ranks(2).run(lambda group: group.barrier())  # all are up: the timeout is the worker's alone
    with pytest.raises(error, match=message) as caught:
        ranks(2).run(worker, timeout=2.5 if error is CommTimeout else 20)
    assert caught.type is error
    assert ranks(2).run(lambda group: float(group.all_reduce(np.ones(1))[0])) == [2.0, 2.0]


def test_a_result_that_cannot_be_sent_back_is_a_failure_of_its_rank(processes):
    message = "the worker's result, of type lock, cannot be sent to another process: .*; send what"
    fails(processes(2), lambda group: threading.Lock(), RankFailed, message)


def test_an_exception_counts_for_more_than_the_deadlock_that_follows(ranks):
    def worker(group):
        if group.rank == 1:
            raise KeyError("the cause")
        group.barrier()

    error = fails(ranks(3), worker, RankFailed, "rank 1 failed", "the cause")
    assert isinstance(error.__cause__, KeyError) and error.rank == 1


def test_messages_of_a_failed_run_do_not_reach_the_next(ranks):
    def leave(group):
        group.send(np.array([13]), to=1 - group.rank)

    def look(group):
        group.send(np.array([group.rank]), to=1 - group.rank)
        return group.recv(1 - group.rank).item()

    with pytest.raises(CommError, match="nobody received"):
        ranks(2).run(leave)
    assert ranks(2).run(look) == [1, 0]
