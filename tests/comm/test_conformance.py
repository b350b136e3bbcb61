"""What every fabric and communicator has to do: results, bytes and errors, against closed forms.

A new one is a row of MACHINES. A row that this computer lacks is skipped once, with the reason.
"""

import itertools
import re
import time
from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.backend import to_device, to_host, why_no_gpu
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.collectives import ALGORITHMS, split_ends, split_sizes
from minidist.comm.message_communicator import MessageCommunicator
from minidist.comm.shared_memory_communicator import PIECE, STAGE
from minidist.errors import CollectiveMismatch, Deadlock
from minidist.planning.costs.collectives import all_reduce_bytes
from tests.strategies import arrays, seeds, shapes

MACHINES = {  # name: (transport, which communicator, device)
    "process": ("process", {}, "cpu"),
    "thread": ("thread", {}, "cpu"),
    "process, messages": ("process", {"connect": MessageCommunicator.connect}, "cpu"),
    "thread, messages": ("thread", {"connect": MessageCommunicator.connect}, "cpu"),
    "process, gpu": ("process", {}, "gpu"),
    "process, messages, gpu": ("process", {"connect": MessageCommunicator.connect}, "gpu"),
}
HERE = [name for name, (*_, device) in MACHINES.items() if device == "cpu" or not why_no_gpu()]
DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128"]
KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@pytest.fixture(params=HERE, scope="module")
def ranks(request, cluster):
    """Return a function: ranks(size) gives a cluster of this machine."""
    transport, communicator, device = MACHINES[request.param]
    TRANSPORTS.setdefault(request.param, partial(TRANSPORTS[transport], **communicator))
    return lambda size: cluster(size, request.param if communicator else transport, device)


def put(group, values):
    """Return the values on the device of the run, as an ordinary array."""
    return to_device(values, group.device)


def places(group, values):
    """Return them ordinary, from `empty`, and from `empty` on all ranks but the last."""
    found = []
    for shared in (False, True, group.rank < group.size - 1):
        x = put(group, values.copy())
        found.append(group.empty(values.shape, values.dtype) if shared else x)
        found[-1][...] = x
    return found


def billed(group, call):
    """Return what the call returns, on the host, and how many bytes others have taken for it."""
    before = group.ledger.total
    result = call()
    return (None if result is None else to_host(result)), group.ledger.total - before


def mine(rank, shape, seed=0, dtype="float64"):
    """Return an array that differs between ranks."""
    return (4 * arrays(*shape, seed=[seed, rank])).astype(dtype)


def total(size, shape, seed=0, dtype="float64", combine=np.add):
    """Return the reduction of these arrays in rank order."""
    return reduce(combine, [mine(rank, shape, seed, dtype) for rank in range(size)])


@pytest.mark.parametrize("name", MACHINES)
def test_this_computer_has_every_machine(name):
    if name not in HERE:
        pytest.skip(f"{name}: no conformance test runs: {why_no_gpu()}")


# Messages.


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
            group.send(np.array(group.rank), to=0, tag=3)
        group.barrier()
        time.sleep(0.05)  # the barrier does not wait for sockets
        if group.rank == 0:
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


# Collectives.


def every_collective(group, shape, seed, op):
    """Call each collective once; return the results, and whether the inputs are what they were."""
    x = put(group, mine(group.rank, shape, seed))
    root = group.size - 1
    pieces = [put(group, mine(r, (r + 1, 2), seed + group.rank)) for r in range(group.size)]
    rows = put(group, mine(group.rank, (group.rank, 2), seed))
    five = put(group, np.stack([to_host(x)] * 5))
    given = [x, rows, five, *pieces]
    before = [array.copy() for array in given]
    results = {
        "all_reduce": group.all_reduce(x, op=op, label="x"),
        "reduce": group.reduce(x, root=root, op=op),
        "broadcast": group.broadcast(x if group.rank == root else None, root=root),
        "all_gather": group.all_gather(rows),
        "all_gather along 1": group.all_gather(rows.T, axis=1),
        "gather": group.gather(rows, root=root),
        "scatter": group.scatter(pieces if group.rank == root else None, root=root),
        "reduce_scatter": group.reduce_scatter(five, op=op),
        "reduce_scatter by sizes": group.reduce_scatter(five, [5] + [0] * (group.size - 1), op=op),
        "in place": group.all_reduce(target := x.copy(), op=op, out=target) is target and target,
        **{f"from {r}": piece for r, piece in enumerate(group.all_to_all(pieces))},
    }
    group.barrier()
    found = {name: None if x is None else to_host(x).copy() for name, x in results.items()}
    for result in results.values():
        if result is not None:
            result[...] = -1  # fresh, hence writable and nobody else's
    group.barrier()
    return found, all(bool((a == b).all()) for a, b in zip(given, before, strict=True))


@settings(max_examples=6)
@given(size=st.integers(1, 4), shape=shapes(), seed=seeds, op=st.sampled_from(sorted(KINDS)))
def test_every_collective_does_what_numpy_says(ranks, size, shape, seed, op):
    inputs, root = [mine(r, shape, seed) for r in range(size)], size - 1
    reduced = total(size, shape, seed, combine=KINDS[op])
    rows = np.concatenate([mine(r, (r, 2), seed) for r in range(size)])
    five = np.stack([reduced] * 5)
    for rank, (got, untouched) in enumerate(ranks(size).run(every_collective, shape, seed, op)):
        want = {
            "all_reduce": reduced,
            "reduce": reduced if rank == root else None,
            "broadcast": inputs[root],
            "all_gather": rows,
            "all_gather along 1": rows.T,
            "gather": rows if rank == root else None,
            "scatter": mine(rank, (rank + 1, 2), seed + root),
            "reduce_scatter": np.array_split(five, size)[rank],
            "reduce_scatter by sizes": five[: 5 if rank == 0 else 0],
            "in place": reduced,
            **{f"from {r}": mine(rank, (rank + 1, 2), seed + r) for r in range(size)},
        }
        assert untouched and got.keys() == want.keys()
        for name, w in want.items():
            if w is None:
                assert got[name] is None, name
            else:
                assert got[name].shape == w.shape and got[name].tobytes() == w.tobytes(), name


def reductions(group, n, dtype, op):
    """Return what all_reduce and reduce_scatter give, and move, for an array in each place."""
    found, values = [], mine(group.rank, (n,), dtype=dtype)
    for two in places(group, np.stack([values] * 2)):
        x, other = two[1], put(group, values)  # x is a part of an array
        found.append(billed(group, lambda x=x: group.all_reduce(x, op)))
        found.append(billed(group, lambda x=x: group.reduce_scatter(x, op=op)))
        last = [0] * (group.size - 1) + [n]  # pieces that are not equal
        found.append(billed(group, lambda x=x, last=last: group.reduce_scatter(x, last, op=op)))
        assert to_host(x).tobytes() == values.tobytes()
        found.append(billed(group, lambda x=x: group.all_reduce(x, op, out=x)))
        assert found[-1][0].tobytes() == to_host(x).tobytes()
        found.append(billed(group, lambda x=x, y=other: group.all_reduce(y, op, out=x)))
        assert found[-1][0].tobytes() == to_host(x).tobytes()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions_have_the_same_bits_and_bytes_wherever_the_arrays_are(ranks, size):
    edges = [STAGE // 8 + more for more in ([-1, 0, 1, 12_345] if size == 3 else [12_345])]
    several = [*edges, 2 * size * PIECE // 8 + 3]  # stages, pieces
    plain = [(n, "float64", "sum") for n in [0, 1, size + 1, 101, *several]]
    for n, dtype, op in [*plain, *itertools.product([7], DTYPES, KINDS if size == 3 else ["sum"])]:
        want, sizes = total(size, (n,), dtype=dtype, combine=KINDS[op]), split_sizes(n, size)
        all_bytes, ends = all_reduce_bytes(None, n, want.itemsize, size), split_ends(n, size)
        for rank, found in enumerate(ranks(size).run(reductions, n, dtype, op)):
            piece = want[ends[rank] : ends[rank + 1]], want.nbytes - want.itemsize * sizes[rank]
            whole, has = (want, all_bytes[rank]), rank == size - 1
            last = want if has else want[:0], 0 if has else want.nbytes
            cycle = [whole, piece, last, whole, whole] * 3
            for (got, moved), (array, nbytes) in zip(found, cycle, strict=True):
                assert (got.dtype, got.tobytes()) == (array.dtype, array.tobytes()), (n, dtype, op)
                assert moved == nbytes, (n, dtype, op)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gather_into_out_has_the_same_bits_and_bytes_wherever_out_is(ranks, size):
    def worker(group, n, dtype):
        ends, whole = split_ends(n, group.size), mine(9, (n,), dtype=dtype)
        part, wrong = slice(ends[group.rank], ends[group.rank + 1]), []
        for own in (False, True):  # x: apart, or its own part of out
            for out in places(group, np.zeros(n, dtype)):
                x = out[part] if own else out[part].copy()
                x[:] = put(group, whole[part])
                got, moved = billed(group, lambda x=x, out=out: group.all_gather(x, out=out))
                right = got.tobytes() == to_host(out).tobytes() == whole.tobytes()
                right = right and group.all_gather(x, out=out) is out
                if not right or moved != (group.size - 1) * x.nbytes:
                    wrong.append((own, moved))
        return wrong

    for n in [0, 1, size - 1, size + 1, 101, 100_003]:
        for dtype in ["float64"] if n > 200 else ["float64", "bool", "float16", "complex64"]:
            assert ranks(size).run(worker, n, dtype) == [[]] * size


def test_rows_and_arrays_with_gaps_or_overlap_are_reduced_as_well(ranks):
    def worker(group):
        found = []
        for rows, tall, line in zip(
            places(group, mine(group.rank, (6, 8), 1)),
            places(group, mine(group.rank, (8, 6), 2)),
            places(group, mine(group.rank, (9,), 3)),
            strict=True,
        ):
            found.append(group.reduce_scatter(rows, [1, 3, 2]))
            found.append(group.reduce_scatter(line[::2]))
            found.append(group.all_reduce(rows[::2, 1::3]))
            found.append(group.all_reduce(tall.T, out=rows).copy())
            found.append(group.all_reduce(rows[:, ::2], out=rows[:, ::2]))
            found.append(group.all_reduce(line[:-1], out=line[1:]))
        return [to_host(x) for x in found]

    rows, tall, line = (total(3, s, seed) for seed, s in enumerate([(6, 8), (8, 6), (9,)], 1))
    for rank, found in enumerate(ranks(3).run(worker)):
        cut, ends = [0, 1, 4, 6], split_ends(5, 3)
        pieces = [rows[cut[rank] : cut[rank + 1]], line[::2][ends[rank] : ends[rank + 1]]]
        want = [*pieces, rows[::2, 1::3], tall.T, sum([tall.T[:, ::2]] * 3), line[:-1]]
        for got, wanted in zip(found, want * 3, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-14)


def test_a_piece_may_be_anywhere_in_out(ranks):
    """Every rank's piece is where another rank's goes."""

    def worker(group):
        found = []
        for out in places(group, np.full(6, 10.0 * group.rank)):
            group.all_gather(out[4 - 2 * group.rank :][:2], out=out)
            found.append(to_host(out).tolist())
        return found

    assert ranks(3).run(worker) == [[[0.0, 0.0, 10.0, 10.0, 20.0, 20.0]] * 3] * 3


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_written_right_after_a_collective_does_not_reach_the_others(ranks, shared):
    def worker(group, shared):
        n, wrong = 400_001, 0
        ends, make = split_ends(n, group.size), group.empty if shared else np.empty
        x, out, whole = make(n, "float64"), make(n, "float64"), np.arange(n, dtype="float64")
        for step in range(8):
            x[:] = group.rank + step
            piece = group.reduce_scatter(x)
            x[:] = np.nan  # at once, while slower ranks may still be busy
            wrong += not (piece == 6 + 4 * step).all()
            x[:] = group.rank + step
            total = group.all_reduce(x, out=x if shared else None)
            wrong += not (total == 6 + 4 * step).all()
            total[:] = x[:] = piece[:] = np.nan
            part = put(group, whole[ends[group.rank] : ends[group.rank + 1]])
            group.all_gather(part, out=out)
            wrong += not (to_host(out) == whole).all()
            out[:] = np.nan
        return wrong

    assert ranks(4).run(worker, shared) == [0] * 4


def test_a_scatter_and_a_gather_are_an_all_reduce_in_bits_and_in_bytes_in_split_groups(ranks):
    def worker(group):
        pair = group.split(group.rank % 2)  # ranks 0 and 2, ranks 1 and 3
        for x in places(pair, mine(group.rank, (1003,))):
            want, once = billed(pair, lambda x=x: pair.all_reduce(x))
            out, before = pair.empty(1003, "float64"), dict(pair.ledger.bytes)
            pair.all_gather(pair.reduce_scatter(x), out=out)
            moved = {op: n - before.get(op, 0) for op, n in pair.ledger.bytes.items()}
            assert to_host(out).tobytes() == want.tobytes() and sum(moved.values()) == once
            piece = split_sizes(1003, 2)[pair.rank]
            assert moved["reduce_scatter"] == 8 * (1003 - piece)
        return want.tobytes(), group.ledger.total

    even, odd = (sum(mine(r, (1003,)) for r in pair).tobytes() for pair in ((0, 2), (1, 3)))
    assert ranks(4).run(worker) == [(even, 0), (odd, 0)] * 2


def test_the_ledger_counts_payload_per_operation_and_no_control_traffic(ranks):
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
        own = group.channel("own")
        own.send(x, to=group.rank)
        own.recv(group.rank)
        return {op: n for op, n in group.ledger.bytes.items() if n}

    first, second, third = ranks(3).run(worker)
    assert first == {"all_gather": 48, "broadcast": 48, "all_to_all": 12, "send": 24}
    assert second == {"all_gather": 48, "reduce": 24, "all_to_all": 8, "send": 24}
    assert third == {"all_gather": 48, "reduce": 24, "all_to_all": 4, "send": 24}


def test_integers_in_floats_are_summed_exactly_and_every_algorithm_repeats_bit_for_bit(ranks):
    def worker(group):
        whole, floats = np.arange(1001.0) + group.rank, mine(group.rank, (1001,), 5, "float32")
        ways = [None, *ALGORITHMS]
        sums = [to_host(group.all_reduce(put(group, whole), algorithm=a)) for a in ways]
        assert all((x == 4 * np.arange(1001) + 6).all() for x in sums)
        return [to_host(group.all_reduce(put(group, floats), algorithm=a)).tobytes() for a in ways]

    one, two = ranks(4).run(worker), ranks(4).run(worker)
    assert one + two == [one[0]] * 8


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


# Wrong programs.

MISMATCHES = {
    "all_reduce shape": lambda g, odd: g.all_reduce(np.ones(3 + odd)),
    "all_reduce dtype": lambda g, odd: g.all_reduce(np.ones(3, "f4" if odd else "f8")),
    "all_reduce op": lambda g, odd: g.all_reduce(np.ones(3), op="max" if odd else "sum"),
    "all_reduce label": lambda g, odd: g.all_reduce(np.ones(3), label=None if odd else "a"),
    "all_reduce algorithm": lambda g, odd: g.all_reduce(
        np.ones(3), algorithm="tree" if odd else "ring"
    ),
    "another collective": lambda g, odd: (g.all_gather if odd else g.all_reduce)(np.ones(3)),
    "broadcast root": lambda g, odd: g.broadcast(np.ones(2), root=int(odd)),
    "scatter root": lambda g, odd: g.scatter([np.ones(1)] * 2, root=int(odd)),
    "gather root": lambda g, odd: g.gather(np.ones(2), root=int(odd)),
    "gather shape": lambda g, odd: g.gather(np.ones((2, 2 + odd))),
    "gather dtype": lambda g, odd: g.gather(np.ones(2, "f4" if odd else "f8")),
    "reduce root": lambda g, odd: g.reduce(np.ones(2), root=int(odd)),
    "reduce shape": lambda g, odd: g.reduce(np.ones(2 + odd)),
    "reduce op": lambda g, odd: g.reduce(np.ones(2), op="max" if odd else "sum"),
    "reduce_scatter shape": lambda g, odd: g.reduce_scatter(g.empty(2 + odd)),
    "reduce_scatter sizes": lambda g, odd: g.reduce_scatter(g.empty(3), [2 - odd, 1 + odd]),
    "reduce_scatter op": lambda g, odd: g.reduce_scatter(g.empty(2), op="max" if odd else "sum"),
    "all_gather axis": lambda g, odd: g.all_gather(np.ones((2, 2)), axis=int(odd)),
    "all_gather shape": lambda g, odd: g.all_gather(np.ones((2, 2 + odd))),
    "all_gather out": lambda g, odd: g.all_gather(
        g.empty(1), out=None if odd else g.empty(2), label="w"
    ),
    "all_gather out's shape": lambda g, odd: g.all_gather(g.empty(2), out=g.empty(4 + odd)),
    "all_gather out's label": lambda g, odd: g.all_gather(
        g.empty(2), out=g.empty(4), label=f"layer {int(odd)}"
    ),
    "all_to_all dtype": lambda g, odd: g.all_to_all([np.ones(1, "f4" if odd else "f8")] * 2),
    "barrier label": lambda g, odd: g.barrier() if odd else g.split(0),
    "long labels": lambda g, odd: g.all_reduce(np.ones(2), label="ä" * 600 + str(odd)),
}


def test_every_argument_that_must_agree_is_compared_and_shown_with_who_and_where(ranks):
    """Each rank catches its own error, and both go on; so one run tries them all."""

    def worker(group):
        found = {}
        for name, call in MISMATCHES.items():
            try:
                call(group, group.rank == 1)
            except CollectiveMismatch as error:
                found[name] = str(error)
        return found

    first, second = ranks(2).run(worker)
    assert first == second and first.keys() == MISMATCHES.keys()
    for name, message in first.items():
        head, *rows = message.splitlines()
        assert head == "ranks [0, 1] of one group did not call the same collective:"
        assert len({row[8:] for row in rows}) == 2, name
        for rank, row in enumerate(rows):
            call = rf"  rank {rank}: (?s:\w+\(.*) at test_conformance.py:\d+$"
            assert re.match(call, row), (name, row)


def test_a_mismatch_in_a_group_of_three_stops_the_run_and_names_who_differs(ranks):
    def worker(group):
        group.all_reduce(np.ones(2))
        group.broadcast(np.ones(2), root=int(group.rank == 2))

    with pytest.raises(CollectiveMismatch, match=r"rank 2: broadcast\(root=1\) at test_conf"):
        ranks(3).run(worker)


def test_equal_calls_in_other_words_do_match(ranks):
    def worker(group):
        odd = group.rank == 1
        group.all_gather(np.ones((2, 3)), axis=-1 if odd else 1)
        group.reduce_scatter(np.ones(3), [np.int64(2), np.int64(1)] if odd else [2, 1])
        return "well"

    assert ranks(2).run(worker) == ["well"] * 2


def test_ranks_that_wait_in_a_collective_permanently_are_told(ranks):
    def worker(group):
        if group.rank:
            group.reduce_scatter(group.empty(4), label="w")

    with pytest.raises(Deadlock, match=r"reduce_scatter\(.*label='w'\) for rank 0") as caught:
        ranks(3).run(worker, timeout=8)
    assert "rank 0: has finished" in str(caught.value)
