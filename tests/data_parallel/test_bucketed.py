"""Buckets: the same bits as without them, reduced while backward still runs."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, run
from minidist.data_parallel.bucketed import Bucketed, plan
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.errors import Deadlock, RankFailed
from minidist.events import EventLog
from minidist.nn.datasets import shard
from minidist.verify.compare import compare
from minidist.verify.strategies import collect
from tests.strategies import arrays


@given(sizes=st.lists(st.integers(0, 9), max_size=8), cap=st.integers(1, 100))
def test_the_plan_holds_every_parameter_once_last_first_within_the_cap(sizes, cap):
    parameters = [nn.Parameter(np.zeros(n), str(i)) for i, n in enumerate(sizes)]
    buckets = plan(parameters, cap)
    assert [p for bucket in reversed(buckets) for p in bucket] == parameters
    for bucket in buckets:
        assert len(bucket) == 1 or sum(p.data.nbytes for p in bucket) <= cap
    for early, late in itertools.pairwise(buckets):  # no bucket could take the next one
        assert sum(p.data.nbytes for p in early) + late[-1].data.nbytes > cap


def test_a_cap_below_one_byte_is_refused(cluster):
    with pytest.raises(RankFailed, match="one byte or more, not 0"):
        cluster(1, "thread").run(lambda group: Bucketed(nn.MLP([2, 2]), group, cap=0))


def step(group, cap, way="bucketed"):
    """Take the gradient of 7 examples in two micro-batches; return it, and the bytes moved."""
    model = nn.MLP([5, 8, 8, 3], activation="gelu", dtype="float64").flatten(group.empty)
    x, y = arrays(7, 5), np.arange(7) % 3
    mine = shard(np.arange(7), group.rank, group.size)
    first, last = np.array_split(mine, 2)
    reducer = Bucketed(model, group, cap) if way == "bucketed" else None

    def backward(rows):
        nn.cross_entropy(model(x[rows]), y[rows], reduction_size=7).backward()

    backward(first)
    if reducer is None:
        backward(last)
        all_reduce_gradients(model, group)
        return collect(model), group.ledger.total
    with reducer.reduce():
        backward(last)
    return collect(model), reducer.group.ledger.total


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_the_bits_depend_neither_on_the_cap_nor_on_buckets_at_all(cluster, transport):
    ranks = cluster(3, transport)
    want = ranks.run(step, 0, "naive")
    for cap in (1, 64, 500, 1 << 20):
        for (got, _), (naive, _) in zip(ranks.run(step, cap), want, strict=True):
            assert all(got[name].tobytes() == naive[name].tobytes() for name in naive)


def waits_for_a_bucket(group):
    """Train a model whose last gradient is complete only when the first bucket has been summed."""
    summed = threading.Event()

    class Watched(Bucketed):
        def all_reduce(self, bucket):
            super().all_reduce(bucket)
            summed.set()

    model = nn.MLP([256] * 9).flatten(group.empty)
    reducer = Watched(model, group, cap=600_000)  # two layers each
    model.layers[0].weight.add_hook(lambda p: summed.wait(5))
    x = np.ones((512, 256), np.float32)
    for _ in range(3):
        summed.clear()
        loss = nn.cross_entropy(model(x), np.zeros(512, int), 512 * group.size)
        with reducer.reduce(), group.log.span("backward"):
            loss.backward()
        for p in model.parameters():
            p.grad = None


def test_the_first_bucket_is_under_way_before_the_last_backward_operation_ends():
    log = EventLog()
    run(waits_for_a_bucket, 2, log=log)
    for rank in (0, 1):
        events = [e for e in log.events if e.rank == rank]
        backwards = [e for e in events if e.name == "backward"]
        buckets = [e for e in events if e.name.startswith("all_reduce bucket")]
        assert len(backwards) == 3 and all(e.thread == "buckets" for e in buckets)
        order = [int(e.name.split()[-1]) for e in buckets]
        assert order == sorted(order[: len(order) // 3]) * 3 and len(set(order)) == 4
        for i, backward in enumerate(backwards):
            first = buckets[i * len(buckets) // 3]
            assert backward.start < first.start < first.end < backward.end


def test_a_rank_without_examples_or_without_backward_still_launches_every_bucket(cluster):
    def worker(group, empty):
        model = nn.MLP([3, 4, 2], dtype="float64")
        reducer = Bucketed(model, group, cap=40)
        x, y = arrays(2, 3), np.array([0, 1])
        with reducer.reduce():
            if group.rank == 0 or empty:
                rows = slice(0, 2 if group.rank == 0 else 0)
                nn.cross_entropy(model(x[rows]), y[rows], reduction_size=2).backward()
        return collect(model)

    for empty in (True, False):
        found = cluster(3, "thread").run(worker, empty)
        assert compare(found, found[0]).ok and np.abs(found[0]["layers.0.weight"]).max() > 0


def test_a_rank_that_does_not_reduce_is_a_deadlock_whose_table_shows_the_second_thread(cluster):
    def worker(group):
        reducer = Bucketed(nn.MLP([3, 2]), group)
        if group.rank == 0:
            with reducer.reduce():
                pass

    with pytest.raises(Deadlock, match=r"\(buckets\) for rank 1") as caught:
        cluster(2, "thread").run(worker)
    first, *_ = [line for line in str(caught.value).splitlines() if "end of all buckets" in line]
    assert "rank 0: waits in the end of all buckets for rank 0" in first
    assert "at bucketed.py" in first


def test_a_failure_in_the_second_thread_is_the_ranks_failure(cluster):
    def worker(group):
        model = nn.MLP([3, 2])
        reducer = Bucketed(model, group)
        reducer.buckets[0] = [None]
        with reducer.reduce():
            pass

    with pytest.raises(RankFailed, match="AttributeError"):
        cluster(1).run(worker)


def test_a_step_inside_of_a_step_is_refused(cluster):
    def worker(group):
        model = nn.MLP([3, 2], dtype="float64").flatten()
        bucketed = Bucketed(model, group)
        with bucketed.reduce(), pytest.raises(ValueError, match="reduced already; leave its"):
            with bucketed.reduce():
                pass
        return [p.grad for p in model.parameters()]

    cluster(2, "thread").run(worker)
