"""Messages between two ranks: they arrive as they were sent, in order, and nobody waits to send."""

import itertools
import time

import numpy as np

from minidist.backend import to_host
from tests.comm.conformance.inputs import DTYPES, put


def test_a_message_arrives_as_it_was_sent(ranks):
    kinds = itertools.product([*DTYPES, "uint32", "complex64"], [(), (0,), (3, 0, 2), (5,), (2, 3)])
    sent = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for dtype, shape in kinds]
    sent += [np.arange(12.0).reshape(3, 4).T[1:], np.arange(9.0)[::2]]

    def worker(group, sent):
        if group.rank:
            return [to_host(group.recv(0)) for _ in sent]
        for x in sent:
            group.send(y := put(group, x).copy(), to=1)
            y[...] = 0  # the message is a copy
        return group.ledger.bytes["send"]

    moved, received = ranks(2).run(worker, sent)
    assert moved == sum(x.nbytes for x in sent)
    for got, want in zip(received, sent, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


def test_sends_of_any_number_and_size_never_wait_for_the_receiver(ranks):
    def worker(group):
        other = 1 - group.rank
        for i in range(3):
            group.send(np.full(2_000_000, i, np.float32), to=other)  # 8 MB each, both ways at once
        for i in range(500):
            group.send(np.array([i]), to=other, tag=7)
        small = [group.recv(other, tag=7).item() for _ in range(500)]
        return small, [group.recv(other)[-1].item() for _ in range(3)]

    assert ranks(2).run(worker) == [(list(range(500)), [0, 1, 2])] * 2


def test_a_rank_may_return_right_after_a_send(ranks):
    def worker(group):
        if group.rank == 0:
            return group.send(np.ones(1_000_000), to=1)
        time.sleep(0.2)
        return group.recv(0).sum()

    assert ranks(2).run(worker)[1] == 1_000_000


def test_requests_get_messages_in_the_order_in_which_they_were_made(ranks):
    def worker(group):
        if group.rank == 0:
            waited = [group.isend(np.array(i), to=1).wait() for i in range(4)]
            for i in range(5):
                group.send(np.array(i), to=1, tag=1 + (i == 4))
            return waited
        first, second, third = (group.irecv(0) for _ in range(3))
        found = [third.wait(), first.wait(), second.wait(), first.wait(), group.recv(0)]
        first, second = group.irecv(0, 1), group.irecv(0, 1)  # they come before a later recv
        found += [group.recv(0, 1), group.recv(0, 2), first.wait(), group.recv(0, 1), second.wait()]
        return [int(x) for x in found]

    assert ranks(2).run(worker) == [[None] * 4, [2, 0, 1, 0, 3, 2, 4, 0, 3, 1]]


def test_recv_any_looks_at_its_sources_in_the_order_given(ranks):
    def worker(group, order):
        if group.rank:
            for tag in (3, 4):
                group.send(np.array(group.rank), to=0, tag=tag)
        else:
            for source in (2, 1):
                group.recv(source, tag=4)  # so what it sent before is here, too
            found = [group.recv_any(order, tag=3) for _ in order or range(2)]
            assert all(source == array for source, array in found)
            return [source for source, _ in found]

    for order in ([1, 2], [2, 1]):
        assert ranks(3).run(worker, order)[0] == order
    assert ranks(3).run(worker, None)[0] == [1, 2]


def test_recv_any_loses_nothing_and_keeps_the_order_of_each_source(ranks):
    """Small messages are in ring buffers, large ones in sockets, some find the rank asleep."""
    count, random = 60, np.random.default_rng(0)
    sizes = random.choice([1, 100, 200_000], (4, count), p=[0.6, 0.3, 0.1])

    def worker(group):
        if group.rank:
            for number, size in enumerate(sizes[group.rank]):
                group.send(np.full(size, number), to=0, tag=number % 2)
                if number % 20 == group.rank:
                    time.sleep(0.01)
            return
        left = {(source, tag): [*range(tag, count, 2)] for source in (1, 2, 3) for tag in (0, 1)}
        sources = [1, 2, 3]
        while any(left.values()):
            tag = 0 if any(left[r, 0] for r in sources) else 1
            source, array = group.recv_any([r for r in sources if left[r, tag]], tag)
            number = left[source, tag].pop(0)
            assert array.shape == (sizes[source][number],) and (array == number).all()
            sources = sources[1:] + sources[:1]

    ranks(4).run(worker)


def test_recv_any_leaves_other_tags_alone_and_counts_ranks_as_its_group_does(ranks):
    def worker(group):
        pair = group.split(0 if group.rank else None)
        if pair is None:
            return None
        if pair.rank:
            pair.send(np.array(1), to=0, tag=1)
            time.sleep(0.05)
            return pair.send(np.array(2), to=0, tag=2)
        pair.send(np.array(7), to=0, tag=9)
        assert pair.recv_any(tag=9) == (0, 7) and pair.ledger.total == 0  # from itself
        return pair.recv_any([0, 1], tag=2), pair.recv(1, tag=1)

    assert ranks(3).run(worker)[1] == ((1, 2), 1)
