"""Injected faults: each must turn `verify` red, on real processes, and the row must say where
and by how much.
"""

from dataclasses import replace

import numpy as np
import pytest

from minidist.data_parallel.bucketed import Bucketed
from minidist.datasets import shard
from minidist.tools import strategies
from minidist.tools.equivalence import verify
from minidist.tools.strategies.data_parallel import bucketed_worker, naive_worker


def no_all_reduce(group, case, **options):
    """Every rank keeps its own gradient."""
    group.all_reduce = lambda x, **_: x.copy()
    return naive_worker(group, case, **options)


def averaged_twice(group, case, **options):
    """The loss divides by the whole batch, and then the sum is divided by the ranks as well."""
    total = group.all_reduce
    group.all_reduce = lambda x, **more: total(x, **more) / group.size
    return naive_worker(group, case, **options)


def same_batch_everywhere(group, case, **options):
    """Every rank works on the first rank's examples."""
    first = shard(np.arange(len(case.inputs)), 0, group.size)
    rows = np.resize(first, len(case.inputs))
    return naive_worker(
        group, replace(case, inputs=case.inputs[rows], targets=case.targets[rows]), **options
    )


def mean_of_means(group, case, **options):
    """Every rank divides by its own targets, and the means are averaged as if shards were even."""

    def loss(logits, targets, reduction_size):
        return case.loss(logits, targets, max(1, targets.size) * group.size)

    return naive_worker(group, replace(case, loss=loss), **options)


def one_parameter_forgotten(group, case, **options):
    """The last bias is not reduced."""
    total, last = group.all_reduce, list(case.model.named_parameters())[-1]
    group.all_reduce = lambda x, label: x if label == last else total(x, label=label)
    return naive_worker(group, case, **options)


def rounded_on_the_way(group, case, **options):
    """Gradients travel in float32."""
    total = group.all_reduce
    group.all_reduce = lambda x, **more: total(x.astype("float32"), **more).astype(x.dtype)
    return naive_worker(group, case, **options)


FAULTS = [
    no_all_reduce,
    averaged_twice,
    same_batch_everywhere,
    mean_of_means,
    one_parameter_forgotten,
    rounded_on_the_way,
]


def a_bucket_forgotten(group, case, **options):
    """The last bucket to launch is never reduced."""

    def forget(self, bucket, reduce=Bucketed._all_reduce):
        if bucket < len(self.buckets) - 1:
            reduce(self, bucket)

    return with_method("_all_reduce", forget, group, case, options)


def launched_too_early(group, case, **options):
    """A bucket counts as full when its first gradient is there; the others are not reduced."""

    def hasty(self, bucket, reduce=Bucketed._all_reduce):
        whole, self.buckets[bucket] = self.buckets[bucket], self.buckets[bucket][:1]
        reduce(self, bucket)
        self.buckets[bucket] = whole

    return with_method("_all_reduce", hasty, group, case, options)


def with_method(name, method, group, case, options):
    """Run the bucketed worker with a method of Bucketed replaced, on this rank, for this once."""
    sound = getattr(Bucketed, name)
    setattr(Bucketed, name, method)
    try:
        return bucketed_worker(group, case, **options)
    finally:
        setattr(Bucketed, name, sound)


def moves_more_than_it_should(group, case, **options):
    """The gradients are right, but everything is sent once more."""
    outcome = naive_worker(group, case, **options)
    return replace(outcome, bytes=outcome.bytes + (8 if group.size > 1 else 0))


def rows_with(monkeypatch, fault, size, strategy="naive"):
    sound = strategies.STRATEGIES[strategy]
    monkeypatch.setitem(strategies.STRATEGIES, strategy, replace(sound, worker=fault))
    return list(verify([strategy], [size]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", [a_bucket_forgotten, launched_too_early])
def test_verify_turns_red_for_buckets(monkeypatch, fault, size):
    rows = rows_with(monkeypatch, fault, size, "bucketed")
    assert all(not row["ok"] and row["error"] > 1e-9 for row in rows), rows


def test_wrong_bytes_are_red_though_the_gradients_are_right(monkeypatch):
    for row in rows_with(monkeypatch, moves_more_than_it_should, 2):
        assert not row["ok"] and row["error"] <= 1e-9 and "bytes moved, not" in row["detail"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_verify_turns_red(monkeypatch, fault, size):
    rows = rows_with(monkeypatch, fault, size)
    red = [row for row in rows if not row["ok"]]
    assert red and any(row["error"] > 1e-9 for row in red)
    for row in red:
        if row["error"] > 1e-9:
            assert "differs on rank" in row["detail"] and "got/want" in row["detail"]
    if fault is not mean_of_means:  # which is right where shards are even: 2 examples on 2 ranks
        assert len(red) == len(rows) or size > 2


def test_without_a_fault_verify_is_green():
    assert all(row["ok"] for row in verify(["naive"], [2]))


def test_averaging_twice_shows_as_one_over_the_number_of_ranks(monkeypatch):
    row = rows_with(monkeypatch, averaged_twice, 4)[0]
    assert "got/want = 0.25" in row["detail"]


def test_a_missing_all_reduce_also_shows_in_the_bytes(monkeypatch):
    row = rows_with(monkeypatch, no_all_reduce, 2)[0]
    assert row["bytes"] == 0 < row["bytes_formula"] and "0 bytes moved, not" in row["detail"]


def test_the_command_line_turns_red_as_well(monkeypatch, capsys):
    from minidist.cli import main

    sound = strategies.STRATEGIES["naive"]
    monkeypatch.setitem(strategies.STRATEGIES, "naive", replace(sound, worker=averaged_twice))
    assert main(["verify", "--transport", "thread", "--strategy", "naive"]) == 1
    assert "FAIL naive" in capsys.readouterr().out
