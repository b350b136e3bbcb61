"""Every collective, every algorithm: what NumPy says, fresh results, and bytes to the byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.backend import to_host
from minidist.comm.collectives import ALGORITHMS
from minidist.pieces import split_ends
from minidist.planning.costs.collectives import all_reduce_bytes
from tests.comm.conformance.inputs import KINDS, billed, mine, places, put, same, total
from tests.strategies import seeds, shapes


def every_collective(group, shape, seed, op, shared):
    """Call each collective once; return the results, and whether inputs and results are apart."""
    x = put(group, mine(group.rank, shape, seed))
    if shared:
        ordinary, x = x, group.empty(x.shape, x.dtype)
        x[...] = ordinary
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
    found = {name: None if x is None else to_host(x).copy() for name, x in results.items()}
    fresh = [result for result in results.values() if result is not None]
    group.barrier()
    for result in fresh:
        result[...] = -1  # writable; it must reach no input, and nobody else's result
    group.barrier()
    apart = all(bool((a == b).all()) for a, b in zip(given, before, strict=True))
    for array in given:
        array[...] = -2
    group.barrier()
    return found, apart and all(bool((result == -1).all()) for result in fresh)


@settings(max_examples=6)
@given(
    size=st.integers(1, 4),
    shape=shapes(),
    seed=seeds,
    op=st.sampled_from(sorted(KINDS)),
    shared=st.booleans(),
)
def test_every_collective_does_what_numpy_says(ranks, size, shape, seed, op, shared):
    inputs, root = [mine(r, shape, seed) for r in range(size)], size - 1
    reduced = total(size, shape, seed, combine=KINDS[op])
    rows = np.concatenate([mine(r, (r, 2), seed) for r in range(size)])
    five = np.stack([reduced] * 5)
    runs = ranks(size).run(every_collective, shape, seed, op, shared)
    for rank, (got, apart) in enumerate(runs):
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
        assert apart and got.keys() == want.keys()
        for name, w in want.items():
            if w is None:
                assert got[name] is None, name
            else:
                reduces = "reduce_scatter" in name or name in ("all_reduce", "in place")
                assert same(got[name], w, ranks.in_rank_order or not reduces), name


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
        ends, whole = split_ends(n, group.size), np.arange(n, dtype="float64")
        x, out = (
            group.empty(n, "float64") if shared else put(group, whole.copy()) for _ in range(2)
        )
        for step in range(4):
            x[:] = group.rank + step
            piece = group.reduce_scatter(x)
            x[:] = np.nan  # at once, while slower ranks may still be busy
            wrong += not (piece == 3 + 3 * step).all()
            x[:] = group.rank + step
            total = group.all_reduce(x, out=x if shared else None)
            wrong += not (total == 3 + 3 * step).all()
            total[:] = x[:] = piece[:] = np.nan
            part = put(group, whole[ends[group.rank] : ends[group.rank + 1]])
            group.all_gather(part, out=out)
            wrong += not (to_host(out) == whole).all()
            out[:] = np.nan
        return wrong

    assert ranks(3).run(worker, shared) == [0] * 3


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


def test_every_algorithm_sums_whole_numbers_exactly_and_moves_what_its_formula_says(ranks):
    size, names = 4, [None, *ALGORITHMS]

    def worker(group, n):
        values, found = np.round(mine(group.rank, (n,))), []
        for name in names:
            x, gaps = put(group, values), put(group, np.stack([values] * 2, axis=1))[:, 0]
            got, moved = billed(group, lambda x=x, name=name: group.all_reduce(x, algorithm=name))
            assert group.all_reduce(gaps, algorithm=name, out=gaps) is gaps
            found.append((moved, got.tolist(), to_host(gaps).tolist(), to_host(x).tolist()))
        return found

    for n in (0, 2, 1001):
        inputs = [np.round(mine(rank, (n,))) for rank in range(size)]
        want = sum(inputs).tolist()
        for rank, found in enumerate(ranks(size).run(worker, n)):
            for name, got in zip(names, found, strict=True):
                moved = all_reduce_bytes(name, n, 8, size)[rank]
                assert got == (moved, want, want, inputs[rank].tolist()), (name, n)


def test_every_algorithm_repeats_bit_for_bit(ranks):
    def worker(group):
        x = put(group, mine(group.rank, (1001,), 5, "float32"))
        ways = [None, *ALGORITHMS]
        return [to_host(group.all_reduce(x, algorithm=way)).tobytes() for way in ways]

    one, two = ranks(4).run(worker), ranks(4).run(worker)
    assert one == [one[0]] * 4 and two == [two[0]] * 4
    first = 0 if ranks.in_rank_order else 1  # None: MPI may choose another order each time
    assert one[0][first:] == two[0][first:]
