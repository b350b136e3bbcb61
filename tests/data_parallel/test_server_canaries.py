"""Mistakes and faults of parameter servers: each must turn the replay or the bound red.

A mistake is one of the register. A fault goes wrong once, or at a moment that no code decides.
"""

import threading
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from minidist import run
from minidist.data_parallel.parameter_server import Server, ServerPlan
from minidist.errors import RankFailed
from tests.data_parallel.serving import mlp, mlp_data, run_and_replay, session, violations
from tests.planted import planted

NAPS = {1: 0.001, 2: 0.001, 3: 0.003}


def instead(fault):
    """Return a context in which a server's update is fault(sound update, server, pushes)."""

    @contextmanager
    def around(group):
        sound = Server._update
        with mock.patch.object(Server, "_update", lambda self, pushes: fault(sound, self, pushes)):
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


def logged_twice(update, server, pushes):
    """The third push is applied twice, and logged twice."""
    update(server, [(push, gradient.copy()) for push, gradient in pushes])
    if len(server.log) == 3:
        update(server, pushes)


def is_red(ranks, plan, rule, around, **more):
    """Return whether the replay has other bits, or finds that such logs cannot be."""
    try:
        found, _, want = run_and_replay(ranks, plan, rule, naps=NAPS, around=around, **more)
    except RankFailed as failed:
        assert isinstance(failed.__cause__, ValueError), failed
        assert "a server logged" in str(failed) or "no run can leave these logs" in str(failed)
        return True
    return any(not np.array_equal(found[0]["weights"][name], want[name]) for name in want)


@pytest.mark.parametrize(
    "plan", [ServerPlan(staleness=None), ServerPlan(staleness=2)], ids=["downpour", "ssp"]
)
@pytest.mark.parametrize("fault", [torn_reads, logged_twice], ids=lambda f: f.__name__)
def test_the_replay_finds_a_fault(cluster, fault, plan):
    assert is_red(cluster(4), plan, "adagrad", instead(fault), count=18)


def test_without_a_fault_the_replay_is_green(cluster):
    nothing = instead(lambda update, server, pushes: update(server, pushes))
    for plan in (ServerPlan(staleness=None), ServerPlan(staleness=2)):
        assert not is_red(cluster(4), plan, "adagrad", nothing, count=18)


def test_the_replay_finds_a_row_that_does_not_travel(cluster):
    plan = ServerPlan(staleness=None, sparse=True)
    assert is_red(cluster(4), plan, "sgd", lambda group: planted("last_row_not_packed"), count=18)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_bound_off_by_one_is_found_by_some_interleaving(staleness):
    def broken(seed):
        args = ServerPlan(staleness=staleness), "sgd", mlp(), mlp_data(12), 12, None, {1: 9}
        found = run(session, 3, *args, transport="thread", interleaving=seed)
        return violations(found[0]["log"], staleness, [1, 2])

    assert not any(broken(seed) for seed in range(8))
    with planted("staleness_off_by_one"):  # ranks are threads of this process
        assert any(broken(seed) for seed in range(8))


def test_a_version_that_comes_after_its_own_update_is_no_history(cluster):
    def from_the_future(update, server, pushes):
        update(server, pushes)
        if len(server.log) == 5:
            push = server.log[-1][0]
            object.__setattr__(push, "versions", (9,))

    with pytest.raises(RankFailed, match="no run can leave these logs"):
        around = instead(from_the_future)
        run_and_replay(cluster(4), ServerPlan(staleness=None), naps=NAPS, around=around)
