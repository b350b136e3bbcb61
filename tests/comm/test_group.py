"""Messages and collectives, on both transports, against NumPy."""

import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.errors import CollectiveMismatch, RankFailed
from tests.strategies import arrays, seeds, shapes

TRANSPORTS = ["process", "thread"]
both = pytest.mark.parametrize("transport", TRANSPORTS)


def on_ranks(cluster, transport, size, worker, *args):
    return cluster(size, transport).run(worker, *args, timeout=60)


def mine(rank, shape, seed, dtype="float64"):
    """Return an array that differs between ranks."""
    return arrays(*shape, seed=[seed, rank], dtype=dtype)


@both
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_a_message_arrives_as_it_was_sent(cluster, transport, dtype, shape):
    sent = np.arange(np.prod(shape)).reshape(shape).astype(dtype)

    def worker(group, array):
        if group.rank == 0:
            group.send(array, to=1)
            return None
        return group.recv(0)

    received = on_ranks(cluster, transport, 2, worker, sent)[1]
    assert received.dtype == sent.dtype and received.shape == sent.shape
    np.testing.assert_array_equal(received, sent)


@both
def test_a_send_copies_and_does_not_need_contiguous_memory(cluster, transport):
    def worker(group):
        if group.rank == 0:
            array = np.arange(12.0).reshape(3, 4)
            group.send(array.T[1:], to=1)
            array[:] = -1
            return None
        return group.recv(0)

    received = on_ranks(cluster, transport, 2, worker)[1]
    np.testing.assert_array_equal(received, np.arange(12.0).reshape(3, 4).T[1:])


@both
def test_sends_of_any_number_and_size_never_wait_for_the_receiver(cluster, transport):
    def worker(group):
        other = 1 - group.rank
        for i in range(3):
            group.send(np.full(2_000_000, i, np.float32), to=other)  # 8 MB each, both ways at once
        for i in range(500):
            group.send(np.array([i]), to=other, tag=7)
        small = [group.recv(other, tag=7).item() for _ in range(500)]
        return small, [group.recv(other)[-1].item() for _ in range(3)]

    for small, large in on_ranks(cluster, transport, 2, worker):
        assert small == list(range(500))
        assert large == [0, 1, 2]


@both
def test_a_rank_may_return_right_after_a_send(cluster, transport):
    def worker(group):
        if group.rank == 0:
            group.send(np.ones(1_000_000), to=1)
            return None
        import time

        time.sleep(0.2)
        return group.recv(0).sum()

    assert on_ranks(cluster, transport, 2, worker)[1] == 1_000_000


@both
def test_requests_get_messages_in_the_order_in_which_they_were_made(cluster, transport):
    def worker(group):
        if group.rank == 0:
            return [group.isend(np.array(i), to=1).wait() for i in range(4)]
        first, second, third = (group.irecv(0) for _ in range(3))
        out_of_order = third.wait(), first.wait(), second.wait(), first.wait()
        return [int(x) for x in (*out_of_order, group.recv(0))]

    assert on_ranks(cluster, transport, 2, worker) == [[None] * 4, [2, 0, 1, 0, 3]]


@both
def test_a_request_gets_its_message_before_a_recv_that_comes_later(cluster, transport):
    def worker(group):
        if group.rank == 0:
            for i in range(5):
                group.send(np.array(i), to=1, tag=i == 4)
            return None
        first, second = group.irecv(0), group.irecv(0)
        received = [group.recv(0), group.recv(0, tag=1), first.wait(), group.recv(0), second.wait()]
        return [int(x) for x in received]

    assert on_ranks(cluster, transport, 2, worker)[1] == [2, 4, 0, 3, 1]


@both
def test_recv_any_looks_at_its_sources_in_the_order_given(cluster, transport):
    def worker(group, order):
        if group.rank:
            group.send(np.array(group.rank), to=0, tag=3)
        group.barrier()
        time.sleep(0.05)  # the barrier does not wait for sockets
        if group.rank == 0:
            found = [group.recv_any(order, tag=3) for _ in order or range(2)]
            assert all(source == array for source, array in found)
            return [source for source, _ in found]

    for order in ([1, 2], [2, 1]):
        assert on_ranks(cluster, transport, 3, worker, order)[0] == order
    assert on_ranks(cluster, transport, 3, worker, None)[0] == [1, 2]


@both
def test_recv_any_loses_nothing_and_keeps_the_order_of_each_source(cluster, transport):
    """Small messages lie in rings, large ones come through sockets, some find the rank asleep."""
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

    on_ranks(cluster, transport, 4, worker)


@both
def test_recv_any_leaves_other_tags_alone_and_hears_oneself(cluster, transport):
    def worker(group):
        if group.rank:
            group.send(np.array(1), to=0, tag=1)
            time.sleep(0.05)
            group.send(np.array(2), to=0, tag=2)
            return
        group.send(np.array(7), to=0, tag=9)
        assert group.recv_any(tag=9) == (0, 7)
        assert group.recv_any([0, 1], tag=2) == (1, 2)
        assert group.recv(1, tag=1) == 1

    on_ranks(cluster, transport, 2, worker)


@both
def test_recv_any_counts_ranks_as_its_group_does(cluster, transport):
    def worker(group):
        pair = group.split(0 if group.rank else None)
        if pair is None:
            return None
        pair.send(np.array(pair.rank), to=1 - pair.rank)
        return pair.recv_any()[0]

    assert on_ranks(cluster, transport, 3, worker) == [None, 1, 0]


def test_recv_any_does_not_take_what_belongs_to_a_request(cluster):
    def worker(group):
        group.send(np.array(group.rank), to=0)
        if group.rank == 0:
            request = group.irecv(1)
            try:
                group.recv_any([0, 1])
            except ValueError as error:
                return str(error), int(request.wait()), group.recv_any()[0]

    message, first, second = on_ranks(cluster, "thread", 2, worker)[0]
    assert "rank 1 with tag 0 belongs to a request of irecv" in message
    assert (first, second) == (1, 0)


@both
def test_a_rank_may_send_to_itself_at_no_cost(cluster, transport):
    def worker(group):
        group.send(np.arange(3), to=group.rank)
        return group.recv(group.rank).tolist(), group.ledger.total

    assert on_ranks(cluster, transport, 1, worker) == [([0, 1, 2], 0)]


def every_collective(group, shape, seed, op):
    """Call each collective once; return the results, and whether the inputs are what they were."""
    x = mine(group.rank, shape, seed)
    before, root = x.copy(), group.size - 1
    pieces = [mine(r, (r + 1, 2), seed + group.rank) for r in range(group.size)]
    rows = mine(group.rank, (group.rank, 2), seed)
    results = {
        "all_reduce": group.all_reduce(x, op=op, label="x"),
        "reduce": group.reduce(x, root=root, op=op),
        "broadcast": group.broadcast(x if group.rank == root else None, root=root),
        "all_gather": group.all_gather(rows),
        "all_gather along 1": group.all_gather(rows.T, axis=1),
        "gather": group.gather(rows, root=root),
        "scatter": group.scatter(pieces if group.rank == root else None, root=root),
        "all_to_all": group.all_to_all(pieces),
        "reduce_scatter": group.reduce_scatter(np.stack([x] * 5), op=op),
        "reduce_scatter by sizes": group.reduce_scatter(
            np.stack([x] * 5), sizes=[5] + [0] * (group.size - 1), op=op
        ),
        "in place": group.all_reduce(target := x.copy(), op=op, out=target) is target and target,
    }
    group.barrier()
    for result in (results["all_reduce"], results["broadcast"], results["reduce"]):
        if result is not None:
            result[...] = result * 1  # fresh, hence writable and nobody else's
    return results, np.array_equal(x, before)


NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@both
@settings(max_examples=8)
@given(size=st.integers(1, 4), shape=shapes(), seed=seeds, op=st.sampled_from(sorted(NUMPY)))
def test_every_collective_does_what_numpy_says(cluster, transport, size, shape, seed, op):
    found = on_ranks(cluster, transport, size, every_collective, shape, seed, op)
    inputs, root = [mine(r, shape, seed) for r in range(size)], size - 1
    reduced = inputs[0].copy()
    for x in inputs[1:]:
        reduced = NUMPY[op](reduced, x)  # in rank order
    rows = np.concatenate([mine(r, (r, 2), seed) for r in range(size)])
    pieces = [[mine(r, (r + 1, 2), seed + giver) for r in range(size)] for giver in range(size)]
    stacked = np.array_split(np.stack([reduced] * 5), size)
    for rank, (got, untouched) in enumerate(found):
        assert untouched
        want = {
            "all_reduce": reduced,
            "reduce": reduced if rank == root else None,
            "broadcast": inputs[root],
            "all_gather": rows,
            "all_gather along 1": rows.T,
            "gather": rows if rank == root else None,
            "scatter": pieces[root][rank],
            "reduce_scatter": stacked[rank],
            "reduce_scatter by sizes": np.stack([reduced] * 5)[: 5 if rank == 0 else 0],
            "in place": reduced,
        }
        for name, w in want.items():
            if w is None:
                assert got[name] is None, name
            else:
                assert got[name].shape == w.shape and got[name].tobytes() == w.tobytes(), name
        for giver in range(size):
            np.testing.assert_array_equal(got["all_to_all"][giver], pieces[giver][rank])


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 1000])
def test_all_reduce_moves_what_its_closed_form_says(cluster, transport, size, n):
    def worker(group, n):
        group.all_reduce(np.ones(n, np.float32))
        return group.ledger.bytes["all_reduce"], group.ledger.total

    moved = on_ranks(cluster, transport, size, worker, n)
    own = [n // size + (r < n % size) for r in range(size)]
    assert moved == [(4 * ((n - own[r]) + (size - 1) * own[r]),) * 2 for r in range(size)]
    assert sum(total for _, total in moved) == 2 * (size - 1) * 4 * n


def test_ten_floats_over_three_ranks_and_a_million_over_four(cluster):
    def worker(group, n):
        group.all_reduce(np.ones(n, np.float32))
        return group.ledger.total

    assert cluster(3).run(worker, 10) == [56, 52, 52]
    assert cluster(4).run(worker, 1_000_000) == [6_000_000] * 4


@both
def test_the_ledger_counts_payload_per_operation_and_no_control_traffic(cluster, transport):
    def worker(group):
        x = np.ones(6, np.float32)
        group.barrier()
        group.split(0)
        group.all_gather(x)
        group.broadcast(x, root=0)
        group.reduce(x, root=0)
        group.all_to_all([x[:r] for r in range(group.size)])
        group.send(x, to=(group.rank + 1) % group.size)
        group.recv((group.rank - 1) % group.size)
        return {op: n for op, n in group.ledger.bytes.items() if n}

    first, second, third = on_ranks(cluster, transport, 3, worker)
    assert first == {"all_gather": 48, "broadcast": 48, "all_to_all": 12, "send": 24}
    assert second == {"all_gather": 48, "reduce": 24, "all_to_all": 8, "send": 24}
    assert third == {"all_gather": 48, "reduce": 24, "all_to_all": 4, "send": 24}


@both
def test_integers_in_floats_are_summed_exactly_and_runs_repeat_bit_for_bit(cluster, transport):
    def worker(group):
        whole = np.arange(1001, dtype=np.float32) + group.rank
        return group.all_reduce(whole), group.all_reduce(mine(group.rank, (1001,), 5, "float32"))

    one, two = (on_ranks(cluster, transport, 4, worker) for _ in range(2))
    np.testing.assert_array_equal(one[0][0], 4 * np.arange(1001) + 6)
    assert len({floats.tobytes() for _, floats in one + two}) == 1


@both
def test_split_makes_groups_that_do_not_hear_each_other(cluster, transport):
    def worker(group):
        pair = group.split(color=group.rank % 2)
        backwards = group.split(color=0, key=-group.rank)
        loner = group.split(color=None if group.rank == 0 else 1)
        nested = pair.split(color=pair.rank)
        return (
            pair.all_gather(np.array([group.rank])).tolist(),
            backwards.all_gather(np.array([group.rank])).tolist(),
            None if loner is None else (loner.rank, loner.size),
            (nested.rank, nested.size, float(nested.all_reduce(np.array(3.0)))),
        )

    found = on_ranks(cluster, transport, 4, worker)
    assert [f[0] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(f[1] == [3, 2, 1, 0] for f in found)
    assert [f[2] for f in found] == [None, (0, 3), (1, 3), (2, 3)]
    assert all(f[3] == (0, 1, 3.0) for f in found)


@pytest.mark.parametrize(
    "name, first, second",
    [
        ("shapes", lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(4))),
        ("dtypes", lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3, "f4"))),
        ("ops", lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(3), op="max")),
        ("kinds", lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_gather(np.ones(3))),
        (
            "labels",
            lambda g: g.all_reduce(np.ones(3), label="a"),
            lambda g: g.all_reduce(np.ones(3)),
        ),
    ],
)
@both
def test_collectives_that_do_not_match_are_an_error_that_shows_who_called_what_and_where(
    cluster, transport, name, first, second
):
    with pytest.raises(CollectiveMismatch) as caught:
        on_ranks(cluster, transport, 2, lambda g: (first if g.rank == 0 else second)(g))
    rows = str(caught.value).splitlines()[1:]
    assert len(rows) == 2 and rows[0].removeprefix("  rank 0") != rows[1].removeprefix("  rank 1")
    for rank, row in enumerate(rows):
        assert re.match(rf"  rank {rank}: all_\w+\(.*\) at test_group.py:\d+$", row), row


@both
def test_a_group_of_three_and_one_who_differs(cluster, transport):
    def worker(group):
        group.all_reduce(np.ones(2))
        group.broadcast(np.ones(2), root=int(group.rank == 2))

    with pytest.raises(CollectiveMismatch, match=r"rank 2: broadcast\(root=1\) at test_group.py"):
        on_ranks(cluster, transport, 3, worker)


@pytest.mark.parametrize(
    "worker, message",
    [
        (lambda g: g.send(np.ones(1), to=2), "to=2 is no rank of a group of 2; use 0 to 1"),
        (lambda g: g.recv(-1), "source=-1 is no rank"),
        (lambda g: g.recv_any([0, 2]), "source=2 is no rank of a group of 2"),
        (lambda g: g.recv_any([]), "recv_any needs a source"),
        (lambda g: g.recv_any(tag="a"), "a tag is a whole number, not 'a'"),
        (lambda g: g.broadcast(np.ones(1), root=5), "root=5 is no rank"),
        (lambda g: g.all_reduce(np.ones(1), op="mean"), "unknown reduction 'mean'"),
        (lambda g: g.all_reduce(np.ones(1), algorithm="magic"), "unknown algorithm 'magic'"),
        (lambda g: g.all_reduce("text"), "only arrays travel between ranks, not str"),
        (lambda g: g.all_reduce(np.array([None])), "arrays of object do not travel"),
        (
            lambda g: g.all_reduce(np.ones(2), out=np.ones(3)),
            r"out is float64\[3\], x is float64\[2\]",
        ),
        (lambda g: g.all_gather(np.ones(2), axis=1), r"axis 1 does not exist .* \[2\]"),
        (lambda g: g.all_gather(np.array(1.0)), "axis 0 does not exist"),
        (lambda g: g.reduce_scatter(np.ones(4), sizes=[1, 2]), r"sizes \[1, 2\] do not cut 4 rows"),
        (lambda g: g.all_to_all([np.ones(1)]), "one array per rank: 2, got 1"),
        (lambda g: g.all_to_all([np.ones(1), np.ones(1, "f4")]), "one dtype, got float64, float32"),
        (lambda g: g.scatter([np.ones(1)], root=g.rank), "one piece per rank on the root: 2"),
    ],
)
def test_what_a_caller_can_get_wrong_is_a_value_error_with_the_numbers(cluster, worker, message):
    with pytest.raises(RankFailed) as caught:
        cluster(2, "thread").run(worker, timeout=10)
    cause = caught.value.__cause__  # for the traceback shows the lines above, with the message
    assert isinstance(cause, ValueError) and re.search(message, str(cause)), cause
