"""Seeded interleavings: races that can be repeated, and so be found and shrunk."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Cluster, run
from minidist.errors import Deadlock, RankFailed


class Box:
    """A value that ranks share behind the back of their group: only threads can."""

    value = 0


def lose_an_update(group):
    """Read, let others go first, write: increments are lost, depending on who comes when."""
    from tests.comm.local.test_interleaving import Box

    seen = Box.value
    group.send(np.ones(1), to=group.rank)
    group.recv(group.rank)
    Box.value = seen + 1


def final_value(seed):
    Box.value = 0
    run(lose_an_update, 3, transport="thread", interleaving=seed)
    return Box.value


def test_a_race_is_found_by_its_seed_and_repeats():
    found = {seed: final_value(seed) for seed in range(12)}
    assert len(set(found.values())) > 1 and set(found.values()) <= {1, 2, 3}
    for seed, value in found.items():
        assert final_value(seed) == value


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_right_programs_are_right_in_every_order(seed, size):
    def worker(group):
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.send(np.array(group.rank), to=right)
        total = float(group.all_reduce(np.array(1.0)))
        return int(group.recv(left)), total, float(group.split(0).all_reduce(np.array(2.0)))

    found = run(worker, size, transport="thread", interleaving=seed)
    assert found == [((r - 1) % size, float(size), 2.0 * size) for r in range(size)]


def arrivals(seed):
    """Return the order in which a rank takes what three others send."""

    def worker(group):
        if group.rank:
            for _ in range(3):
                group.send(np.ones(1), to=0)
            return
        return [group.recv_any([1, 2, 3])[0] for _ in range(9)]

    return tuple(run(worker, 4, transport="thread", interleaving=seed)[0])


def test_who_comes_first_at_recv_any_is_drawn_by_the_seed():
    found = {seed: arrivals(seed) for seed in range(8)}
    assert len(set(found.values())) > 4
    for seed, order in found.items():
        assert arrivals(seed) == order and Counter(order) == {1: 3, 2: 3, 3: 3}


def test_wrong_programs_are_told_as_ever():
    with Cluster(2, "thread", interleaving=3) as ranks:
        with pytest.raises(Deadlock, match=r"waits in recv\(tag=0\) for rank 0"):
            ranks.run(lambda group: group.recv(1 - group.rank), timeout=8)
        with pytest.raises(RankFailed, match="ZeroDivisionError"):
            ranks.run(lambda group: 1 / group.rank or group.barrier())
        assert ranks.run(lambda group: float(group.all_reduce(np.ones(1))[0])) == [2.0, 2.0]
