"""Mistakes and faults of parameter servers: each must turn the replay or the bound red.

A mistake is one of the register. A fault goes wrong once, or at a moment that no code decides.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from minidist import run
from minidist.data_parallel.parameter_server import Plan, Server
from minidist.errors import RankFailed
from minidist.tools import equivalence, strategies
from tests.data_parallel.serving import mlp, mlp_data, run_and_replay, session, violations
from tests.planted import mistaken, planted

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


def lost(update, server, pushes):
    """The third push never happened."""
    if len(server.log) != 2 or vars(server).setdefault("lost", False):
        update(server, pushes)
    else:
        server.lost = True


MISTAKES = ["applied_twice", "third_push_lost", "recorded_version_off_by_one"]
MISTAKES += ["newer_version_recorded", "buffer_not_emptied"]


def is_red(ranks, plan, rule, around, **more):
    """Return whether the replay has other bits, or finds that such logs cannot be."""
    try:
        found, _, want = run_and_replay(ranks, plan, rule, naps=NAPS, around=around, **more)
    except RankFailed as failed:
        assert isinstance(failed.__cause__, ValueError), failed
        assert "a server logged" in str(failed) or "no run can leave these logs" in str(failed)
        return True
    return any(not np.array_equal(found[0]["weights"][name], want[name]) for name in want)


@pytest.mark.parametrize("plan", [Plan(staleness=None), Plan(staleness=2)], ids=["downpour", "ssp"])
@pytest.mark.parametrize("fault", [torn_reads, logged_twice, lost], ids=lambda f: f.__name__)
def test_the_replay_finds_a_fault(cluster, fault, plan):
    assert is_red(cluster(4), plan, "adagrad", instead(fault), count=18)


@pytest.mark.parametrize("plan", [Plan(staleness=None), Plan(staleness=2)], ids=["downpour", "ssp"])
@pytest.mark.parametrize("name", MISTAKES)
def test_the_replay_finds_a_mistake(cluster, name, plan):
    assert is_red(cluster(4), plan, "adagrad", lambda group: planted(name), count=18)


def test_without_a_fault_the_replay_is_green(cluster):
    nothing = instead(lambda update, server, pushes: update(server, pushes))
    for plan in (Plan(staleness=None), Plan(staleness=2)):
        assert not is_red(cluster(4), plan, "adagrad", nothing, count=18)


def test_the_replay_finds_a_row_that_does_not_travel(cluster):
    plan = Plan(staleness=None, sparse=True)
    assert is_red(cluster(4), plan, "sgd", lambda group: planted("last_row_not_packed"), count=18)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_bound_off_by_one_is_found_by_some_interleaving(staleness):
    def broken(seed):
        args = Plan(staleness=staleness), "sgd", mlp(), mlp_data(12), 12, None, {1: 9}
        found = run(session, 3, *args, transport="thread", interleaving=seed)
        return violations(found[0]["log"], staleness, [1, 2])

    assert not any(broken(seed) for seed in range(8))
    with planted("staleness_off_by_one"):  # ranks are threads of this process
        assert any(broken(seed) for seed in range(8))


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("parameter_server", "one_worker_left_out"),
        ("downpour", "applied_twice"),
        ("downpour", "buffer_not_emptied"),
        ("ssp", "third_push_lost"),
    ],
)
def test_verify_turns_red(cluster, strategy, name):
    entry = equivalence.find(strategy)
    worker = mistaken(name, entry.worker)
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
        around = instead(from_the_future)
        run_and_replay(cluster(4), Plan(staleness=None), naps=NAPS, around=around)
