"""All-reduce on two levels, on hosts that the ranks only pretend to be on: every partition."""

from functools import partial, reduce
from itertools import combinations, product

import numpy as np
import pytest

from minidist import Cluster
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.communicator import BY_FORMULA, Ledger
from minidist.planning.costs.collectives import all_reduce_bytes, level_bytes
from tests import causes
from tests.comm.message_communicator import MessageCommunicator
from tests.strategies import arrays

KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
INSIDE, BETWEEN = "all_reduce inside hosts", "all_reduce between hosts"


def partitions(size):
    """Yield every way to put ranks on hosts, as the number of each rank's host."""
    for hosts in product(range(size), repeat=size):
        if all(host <= max(hosts[:r], default=-1) + 1 for r, host in enumerate(hosts)):
            yield list(hosts)


@pytest.fixture
def on_hosts(monkeypatch):
    """Return a function: on_hosts(hosts) starts ranks, each of which takes itself to be there."""

    def start(hosts, transport="thread", interleaving=None, **options):
        row = partial(TRANSPORTS[transport], hosts=hosts, **options)
        monkeypatch.setitem(TRANSPORTS, "pretended", row)
        return Cluster(len(hosts), "pretended", interleaving=interleaving)

    return start


def given(rank, n, whole):
    x = arrays(n, seed=[n, rank])
    return np.round(10 * x) if whole else x


def sums(group, cases):
    """Return the sum, and this rank's bytes inside and between hosts, for each (n, whole)."""
    found, before = [], (0, 0)
    for n, whole in cases:
        result = group.all_reduce(given(group.rank, n, whole), algorithm="hierarchical")
        after = group.ledger.bytes[INSIDE], group.ledger.bytes[BETWEEN]
        assert group.ledger.total == sum(after)
        found.append((result, tuple(b - a for a, b in zip(before, after, strict=True))))
        before = after
    return found


def assert_right(ranks, hosts):
    """Sums are right, whole ones exactly, with the same bits everywhere; bytes are the formula."""
    N, h = len(hosts), len(set(hosts))
    cases = [*product(sorted({0, 1, N - 1, N + 1, 101}), [False, True])]
    first, again = (zip(*ranks.run(sums, cases), strict=True) for _ in range(2))
    for (n, whole), found, repeated in zip(cases, first, again, strict=True):
        results, moved = zip(*found, strict=True)
        inputs = [given(rank, n, whole) for rank in range(N)]
        said = causes.of_sums(inputs, results)
        assert said is None, f"all_reduce, hierarchical, arrays of {n}, hosts {hosts}: {said}"
        assert len({x.tobytes() for x, _ in (*found, *repeated)}) == 1, (hosts, n)
        assert not whole or (results[0] == sum(inputs)).all(), (hosts, n)
        formula = level_bytes(n, 8, hosts)
        assert list(moved) == formula, (hosts, n)
        inside, between = map(sum, zip(*formula, strict=True))
        assert (inside, between) == (2 * (N - h) * 8 * n, 2 * (h - 1) * 8 * n)
        assert all_reduce_bytes("hierarchical", n, 8, N, hosts) == [a + b for a, b in formula]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_partition_of_ranks_into_hosts(on_hosts, size):
    for hosts in partitions(size):
        with on_hosts(hosts) as ranks:
            assert_right(ranks, hosts)


@pytest.mark.parametrize("options", [{}, {"connect": MessageCommunicator.connect}])
def test_a_partition_of_processes_in_shared_memory_and_with_messages(on_hosts, options):
    with on_hosts([0, 1, 0, 2], "process", **options) as ranks:
        assert_right(ranks, [0, 1, 0, 2])


def test_any_order_of_events_gives_the_same_bits(on_hosts):
    for seed in range(2):
        with on_hosts([0, 0, 1, 2, 1], interleaving=seed) as ranks:
            assert_right(ranks, [0, 0, 1, 2, 1])


def test_every_operation_dtype_and_layout_and_the_array_that_the_result_is_to_go_to(on_hosts):
    def some(rank, dtype):
        return np.round(4 * arrays(3, 4, seed=rank)).astype(dtype)

    def worker(group, op, dtype):
        by = partial(group.all_reduce, op=op, algorithm="hierarchical")
        x = some(group.rank, dtype)
        before, place = x.copy(), group.empty(12, dtype).reshape(4, 3)
        found = [by(x), by(x.T), by(x[:, ::2]), by(x[0, 0]), by(x.T, out=place)]
        assert found[-1] is place and (x == before).all()
        part = x.copy()
        found.append(by(part[:, 1:], out=part[:, 1:]))  # it has gaps
        assert (part[:, 0] == before[:, 0]).all()
        line = group.empty(12, dtype)
        line[:] = x.reshape(-1)
        found.append(by(line[:-1], out=line[1:]).copy())  # they overlap
        line[:] = before.reshape(-1)
        for target in (x, line):
            found.append(by(target, out=target))
            assert found[-1] is target
        assert not any(np.may_share_memory(x, y) for x, y in combinations(found, 2))
        return found

    dtypes = ["bool", "int8", "uint16", "float16", "float32", "complex128"]
    cases = [*product(KINDS, ["int64", "float64"]), *product(["sum"], dtypes)]
    with on_hosts([0, 1, 0, 0, 1]) as ranks:
        for op, dtype in cases:
            want = reduce(KINDS[op], [some(rank, dtype) for rank in range(5)])
            views = [want, want.T, want[:, ::2], want[0, 0], want.T, want[:, 1:]]
            views += [want.reshape(-1)[:-1], want, want.reshape(-1)]
            for found in ranks.run(worker, op, dtype):
                for got, wanted in zip(found, views, strict=True):
                    np.testing.assert_array_equal(got, np.asarray(wanted), strict=True)


def test_groups_of_ranks_of_several_hosts_each_count_their_own(on_hosts):
    def worker(group):
        pair = group.split(group.rank % 2, key=-group.rank)  # of ranks 4, 2, 0 and 5, 3, 1
        x = np.arange(7.0) + group.rank
        inner = pair.all_reduce(x, algorithm="hierarchical")
        nothing = group.ledger.total
        outer = group.all_reduce(x, algorithm="hierarchical")
        again = pair.split(0).all_reduce(x, algorithm="hierarchical")
        assert (inner == again).all()
        moved = [(g.ledger.bytes[INSIDE], g.ledger.bytes[BETWEEN]) for g in (pair, group)]
        return inner.tolist(), outer.tolist(), nothing, moved

    hosts = [0, 0, 0, 0, 1, 1]
    with on_hosts(hosts) as ranks:
        found = ranks.run(worker)
    pairs = [level_bytes(7, 8, [hosts[r] for r in group]) for group in ([4, 2, 0], [5, 3, 1])]
    for rank, (inner, outer, nothing, moved) in enumerate(found):
        members = range(rank % 2, 6, 2)
        assert inner == [sum(i + r for r in members) for i in range(7)]
        assert outer == [6 * i + 15 for i in range(7)] and nothing == 0
        assert moved == [pairs[rank % 2][2 - rank // 2], level_bytes(7, 8, hosts)[rank]]


def test_bytes_by_formula_have_a_row_of_their_own():
    ledger = Ledger()
    ledger.bytes.update({"all_reduce": 5, "all_reduce" + BY_FORMULA: 7, "all_gather": 2})
    assert ledger.as_one("x") == {"x": 7, "x" + BY_FORMULA: 7} and ledger.total == 14
    assert Ledger().as_one("x") == {}


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_hosts_are_numbered_by_first_appearance_and_are_one_by_default(on_hosts, transport):
    with on_hosts(["b", "a", "b"], transport) as ranks:
        assert ranks.run(lambda group: group.fabric.hosts) == [[0, 1, 0]] * 3
        assert ranks.run(lambda group: group.split(-group.rank).fabric.hosts) == [[0, 1, 0]] * 3
    with pytest.raises(ValueError, match="3 hosts are named for 2 ranks; name the host of each"):
        Cluster(2, "pretended")
    with Cluster(2, transport) as ranks:
        assert ranks.run(lambda group: group.fabric.hosts) == [[0, 0]] * 2


def test_a_gather_fills_an_array_with_pieces_of_given_sizes(cluster):
    """The part of it that a rank has, for ranks whose array is in shared memory, or is not."""

    def worker(group, sizes):
        start, found = sum(sizes[: group.rank]), []
        for shared in (True, False, group.rank == 1):
            out = group.empty(7, "float64") if shared else np.empty(7)
            out[:], before = -1, group.ledger.total
            x = np.arange(7.0)[start : start + sizes[group.rank]]
            assert group.all_gather(x, out=out, sizes=sizes) is out
            found.append((out.tolist(), group.ledger.total - before))
        return found

    for sizes in [3, 0, 4], [0, 0, 7]:
        for rank, found in enumerate(cluster(3).run(worker, sizes)):
            assert found == [(list(range(7)), 2 * 8 * sizes[rank])] * 3
