"""Groups inside groups, and threads of a rank that communicate at the same time."""

import functools
import threading
import time

import numpy as np
import pytest

from minidist.errors import RankFailed
from tests.comm.conformance.inputs import put
from tests.comm.conformance.wrong_programs import OWN_GROUPS, refused, side_by_side


def test_split_makes_groups_that_do_not_hear_each_other(ranks):
    def worker(group):
        pair = group.split(color=group.rank % 2)
        backwards = group.split(color=0, key=-group.rank)
        loner = group.split(color=None if group.rank == 0 else 1)
        inside = pair.split(color=0)  # the first split of the pair, as the pair is of the group
        nested, again = pair.split(color=pair.rank), group.split(color=group.rank % 2)
        for value, to in ((1, pair), (2, again), (3, inside)):
            to.send(np.array(value), to=1 - pair.rank)
        return (
            pair.all_gather(np.array([group.rank])).tolist(),
            backwards.all_gather(np.array([group.rank])).tolist(),
            None if loner is None else (loner.rank, loner.size),
            (nested.rank, nested.size, float(nested.all_reduce(np.array(3.0)))),
            tuple(int(g.recv(1 - pair.rank)) for g in (inside, again, pair)),
        )

    found = ranks(4).run(worker)
    assert [f[0] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(f[1] == [3, 2, 1, 0] for f in found)
    assert [f[2] for f in found] == [None, (0, 3), (1, 3), (2, 3)]
    assert all(f[3:] == ((0, 1, 3.0), (3, 2, 1)) for f in found)


def test_two_threads_of_a_rank_may_work_in_groups_of_their_own(ranks):
    """Each call has a stage of its own in shared memory."""

    def worker(group):
        groups, found = [group.split(0), group.split(0)], {}

        def repeat(i):
            sums = (groups[i].all_reduce(np.full(50_000, n + i, "f8")) for n in range(10))
            found[i] = [set(total.tolist()) for total in sums]

        side_by_side(lambda: repeat(0), lambda: repeat(1))
        return found

    want = {i: [{3.0 * (n + i)} for n in range(10)] for i in (0, 1)}
    assert ranks(3).run(worker, timeout=60) == [want] * 3


def test_threads_that_take_turns_in_a_group_and_messages_beside_them_are_legal(ranks):
    def worker(group):
        other, found = 1 - group.rank, []

        def chat(tag):
            for i in range(50):
                group.send(np.array(i), to=other, tag=tag)
                assert int(group.recv(other, tag=tag)) == i

        def reduce(i):
            found.append(float(group.all_reduce(np.array(float(i)))))

        talkers = [threading.Thread(target=chat, args=(tag,)) for tag in (1, 2)]
        for talker in talkers:
            talker.start()
        for i in range(10):
            thread = threading.Thread(target=reduce, args=(i,))
            thread.start()
            thread.join()
        for talker in talkers:
            talker.join()
        return found

    want = [2.0 * i for i in range(10)]
    assert ranks(2).run(worker, timeout=20) == [want, want]


def test_two_threads_of_every_rank_in_one_group_neither_hang_nor_mix(ranks):
    def worker(group):
        found = {}

        def repeat(i):
            found[i] = [group.all_reduce(np.ones(3)) for _ in range(2000)]

        side_by_side(lambda: repeat(0), lambda: repeat(1))
        return found[0], found[1]  # KeyError: neither has come to its end

    refused(ranks(2), worker, OWN_GROUPS)


def sends_late(group):
    """Send when the run is over; a message before that would be one that nobody received."""
    while not group.fabric.mailbox.is_over(group.run):
        time.sleep(0.005)
    group.send(np.ones(3), to=1)


LATE = {
    "barrier": lambda group, sub: group.barrier(),
    "ring": lambda group, sub: sub.all_reduce(np.ones(3), algorithm="ring"),
    "recv_any": lambda group, sub: sub.recv_any(),
    "send": lambda group, sub: sends_late(group),
}


@pytest.mark.parametrize("name", LATE)
def test_a_thread_that_outlives_its_run_is_stopped_and_disturbs_no_later_one(ranks, name):
    def first(group):
        sub = group.split(0)

        def late():
            while True:
                LATE[name](group, sub)

        if group.rank == 0:
            target = functools.partial(side_by_side, late)
            threading.Thread(target=target, name="left over", daemon=True).start()
            time.sleep(0.05)

    def second(group):
        deadline = time.monotonic() + 20
        while any(thread.name == "left over" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        filled = [group.empty(100) for _ in range(100)]  # where the old boards were
        for array in filled:
            array[:] = group.rank
        sums = {float(group.split(0).all_reduce(np.array(1.0))) for _ in range(20)}
        return sums, {float(array[0]) for array in filled}

    two = ranks(2)
    two.run(first, timeout=8)
    assert two.run(second, timeout=40) == [({2.0}, {0.0}), ({2.0}, {1.0})]


def test_a_group_of_an_earlier_run_is_refused(ranks):
    def keep(group):
        threading.main_thread().kept = group

    def use(group):
        threading.main_thread().kept.barrier()

    two = ranks(2)
    two.run(keep)
    with pytest.raises(RankFailed, match="this group is of a run that has ended") as caught:
        two.run(use, timeout=8)
    assert caught.value.rank == 0 and two.run(lambda group: "well") == ["well"] * 2


def test_a_group_whose_key_turns_the_ranks_round_reduces_and_gathers_in_its_own_order(ranks):
    def worker(group):
        turned = group.split(0, key=-group.rank)
        out = turned.empty(3, "int64")
        turned.all_gather(put(group, np.array([turned.rank * 10])), out=out)
        piece = turned.reduce_scatter(np.arange(6).reshape(3, 2))
        return turned.rank, out.tolist(), piece.tolist()

    found = ranks(3).run(worker)
    assert found == [(2 - r, [0, 10, 20], [[12 - 6 * r, 15 - 6 * r]]) for r in range(3)]
