"""Injected faults of parameter servers: each must turn the replay or the bound red.

A fault is a context around what a rank does.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from minidist import run
from minidist.data_parallel.parameter_server import Plan, Server, Worker
from minidist.data_parallel.sparse_update import Blocks
from minidist.errors import RankFailed
from minidist.tools import equivalence, strategies
from tests.data_parallel.serving import mlp, mlp_data, run_and_replay, session, violations

NAPS = {1: 0.001, 2: 0.001, 3: 0.003}


def instead(owner, name, fault):
    """Return a context in which a method is fault(sound method, self, ...)."""

    @contextmanager
    def around(group):
        sound = getattr(owner, name)
        with mock.patch.object(owner, name, lambda self, *args: fault(sound, self, *args)):
            yield

    return around


def torn_reads(update, server, pushes):
    """Half of an update is written 2 ms later, by a thread; pulls are answered meanwhile."""
    if writer := vars(server).get("writer"):
        writer.join()
    old = server.slice.data.copy()
    update(server, pushes)
    half = len(old) // 2
    rest = server.slice.data[half:].copy()
    server.slice.data[half:] = old[half:]

    def write_the_rest():
        time.sleep(0.002)
        server.slice.data[half:] = rest

    server.writer = threading.Thread(target=write_the_rest)
    server.writer.start()
    if not server.working:
        server.writer.join()


def applied_twice(update, server, pushes):
    """The optimizer takes two steps where one is logged."""
    update(server, pushes)
    server.optimizer.step()


def logged_twice(update, server, pushes):
    """And so does the log."""
    update(server, [(push, gradient.copy()) for push, gradient in pushes])
    if len(server.log) == 3:
        update(server, pushes)


def logged_but_lost(update, server, pushes):
    """The third push is logged and counted, but its gradient goes nowhere."""
    if len(server.log) == 2:
        pushes = [(push, 0 * gradient) for push, gradient in pushes]
    update(server, pushes)


def lost(update, server, pushes):
    """The third push never happened."""
    if len(server.log) != 2 or vars(server).setdefault("lost", False):
        update(server, pushes)
    else:
        server.lost = True


def an_older_version_recorded(add, worker, batch):
    """What is recorded is the version before the one that was pulled."""
    worker.versions = [max(0, v - 1) for v in worker.versions]
    add(worker, batch)


def a_newer_version_recorded(add, worker, batch):
    worker.versions = [v + 1 for v in worker.versions]
    add(worker, batch)


def a_buffer_that_is_not_emptied(send, worker, server):
    """What has been sent is sent again with the next gradient."""
    send(worker, server)
    part = worker.slices[server]
    kept, add = worker.buffer[part].copy(), worker.add

    def add_to_it(batch):
        add(batch)
        worker.buffer[part] += kept
        worker.add = add

    worker.add = add_to_it


FAULTS = {
    torn_reads: (Server, "_update"),
    applied_twice: (Server, "_update"),
    logged_twice: (Server, "_update"),
    logged_but_lost: (Server, "_update"),
    lost: (Server, "_update"),
    an_older_version_recorded: (Worker, "add"),
    a_newer_version_recorded: (Worker, "add"),
    a_buffer_that_is_not_emptied: (Worker, "_send_buffer"),
}


def is_red(ranks, plan, rule, around, **more):
    """Tell whether the replay has other bits, or finds that such logs cannot be."""
    try:
        found, _, want = run_and_replay(ranks, plan, rule, naps=NAPS, around=around, **more)
    except RankFailed as failed:
        assert isinstance(failed.__cause__, ValueError), failed
        assert "a server logged" in str(failed) or "no run can leave these logs" in str(failed)
        return True
    return any(not np.array_equal(found[0]["weights"][name], want[name]) for name in want)


@pytest.mark.parametrize("plan", [Plan(staleness=None), Plan(staleness=2)], ids=["downpour", "ssp"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_replay_finds(cluster, fault, plan):
    assert is_red(cluster(4), plan, "adagrad", instead(*FAULTS[fault], fault), count=18)


def test_without_a_fault_the_replay_is_green(cluster):
    nothing = instead(Server, "_update", lambda update, server, pushes: update(server, pushes))
    for plan in (Plan(staleness=None), Plan(staleness=2)):
        assert not is_red(cluster(4), plan, "adagrad", nothing, count=18)


def test_the_replay_finds_a_row_that_does_not_travel(cluster):
    def forgetful(pack, blocks, gradient):
        numbers, elements = pack(blocks, gradient)
        return numbers[:-1], elements[: -blocks.sizes[numbers[-1]]]

    plan = Plan(staleness=None, sparse=True)
    assert is_red(cluster(4), plan, "sgd", instead(Blocks, "pack", forgetful), count=18)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_bound_off_by_one_is_found_by_some_interleaving(staleness):
    def one_too_many(may_read, server, worker, clock):
        return may_read(server, worker, clock - 1)

    def broken(seed):
        args = Plan(staleness=staleness), "sgd", mlp(), mlp_data(12), 12, None, {1: 9}
        found = run(session, 3, *args, transport="thread", interleaving=seed)
        return violations(found[0]["log"], staleness, [1, 2])

    assert not any(broken(seed) for seed in range(8))
    with instead(Server, "_may_read", one_too_many)(None):  # ranks are threads of this process
        assert any(broken(seed) for seed in range(8))


def one_worker_left_out(update, server, pushes):
    """The last worker's gradient is not in the sum."""
    update(server, pushes[:-1] or [(push, 0 * gradient) for push, gradient in pushes])


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("parameter_server", one_worker_left_out),
        ("downpour", applied_twice),
        ("downpour", a_buffer_that_is_not_emptied),
        ("ssp", logged_but_lost),
    ],
)
def test_verify_turns_red(cluster, strategy, fault):
    entry = equivalence.find(strategy)

    def worker(group, case, **options):
        with instead(*FAULTS.get(fault, (Server, "_update")), fault)(group):
            return entry.worker(group, case, **options)

    with mock.patch.dict(strategies.STRATEGIES, {strategy: replace(entry, worker=worker)}):
        row = equivalence.check(strategy, entry.cases(3)[0], 3, cluster(3))
    assert not row["ok"] and row["error"] > 1e-9 and "differs on rank" in row["detail"]


def test_a_version_that_comes_after_its_own_update_is_no_history(cluster):
    def from_the_future(update, server, pushes):
        update(server, pushes)
        if len(server.log) == 5:
            push = server.log[-1][0]
            object.__setattr__(push, "versions", (9,))

    with pytest.raises(RankFailed, match="no run can leave these logs"):
        around = instead(Server, "_update", from_the_future)
        run_and_replay(cluster(4), Plan(staleness=None), naps=NAPS, around=around)
