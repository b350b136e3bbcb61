"""Mistakes of the register, and faults of a worker or a case: each must turn `verify` red, on real
processes, and the row must say where and by how much.

`verify` is `check` for every case, on ranks of its own; here the ranks stay up from test to test.
"""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.datasets import shard
from minidist.tools import strategies
from minidist.tools.equivalence import check, verify
from minidist.tools.strategies.data_parallel import naive_worker
from tests.planted import mistaken, planted


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


def own_count_of_targets(group, case, **options):
    """Every rank divides by its own targets that count; the means are weighted by examples."""

    def loss(logits, targets, reduction_size):
        own = max(1, nn.counted(targets)) / max(1, len(targets))
        return case.loss(logits, targets, own * len(case.targets))

    return naive_worker(group, replace(case, loss=loss), **options)


FAULTS = [same_batch_everywhere, mean_of_means]
NAIVE = ["no_all_reduce", "divided_by_ranks_twice", "one_parameter_forgotten"]
NAIVE += ["rounded_to_float32"]


def moves_more_than_it_should(group, case, **options):
    """The gradients are right, but everything is sent once more."""
    outcome = naive_worker(group, case, **options)
    return replace(outcome, bytes=outcome.bytes + (8 if group.size > 1 else 0))


@pytest.fixture
def rows_with(monkeypatch, cluster):
    """Return a function: rows_with(fault, size) gives the rows of `verify` with a fault in it."""

    def rows(fault, size, name="naive"):
        sound = strategies.STRATEGIES[name]
        worker = mistaken(fault, sound.worker) if isinstance(fault, str) else fault
        monkeypatch.setitem(strategies.STRATEGIES, name, replace(sound, worker=worker))
        return [check(name, case, size, cluster(size)) for case in sound.cases(size)]

    return rows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", ["bucket_forgotten", "first_of_a_bucket_alone"])
def test_verify_turns_red_for_buckets(rows_with, fault, size):
    rows = rows_with(fault, size, "bucketed")
    assert all(not row["ok"] and row["error"] > 1e-9 for row in rows), rows


def test_wrong_bytes_are_red_though_the_gradients_are_right(rows_with):
    for row in rows_with(moves_more_than_it_should, 2):
        assert not row["ok"] and row["error"] <= 1e-9 and "bytes moved, not" in row["detail"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "fault", FAULTS + NAIVE, ids=lambda fault: getattr(fault, "__name__", fault)
)
def test_verify_turns_red(rows_with, fault, size):
    rows = rows_with(fault, size)
    red = [row for row in rows if not row["ok"]]
    assert red and any(row["error"] > 1e-9 for row in red)
    for row in red:
        if row["error"] > 1e-9:
            assert "differs on rank" in row["detail"] and "got/want" in row["detail"]
    if fault is not mean_of_means:  # which is right where shards are even: 2 examples on 2 ranks
        assert len(red) == len(rows) or size > 2


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_counts_its_own_targets_is_red_where_they_are_padded_and_nowhere_else(
    rows_with, size
):
    for row in rows_with(own_count_of_targets, size):
        assert row["ok"] == ("padded" not in row["case"]), row
        if not row["ok"]:
            assert "means" in row["detail"] and "divided by its own number" in row["detail"]


def test_without_a_fault_verify_is_green():
    assert all(row["ok"] for row in verify(["naive"], [2]))


def test_averaging_twice_shows_as_one_over_the_number_of_ranks(rows_with):
    row = rows_with("divided_by_ranks_twice", 4)[0]
    assert "got/want = 0.25" in row["detail"]


def test_a_missing_all_reduce_also_shows_in_the_bytes(rows_with):
    row = rows_with("no_all_reduce", 2)[0]
    assert row["bytes"] == 0 < row["bytes_formula"] and "0 bytes moved, not" in row["detail"]


def test_the_command_line_turns_red_as_well(capsys):
    from minidist.cli import main

    with planted("divided_by_ranks_twice"):  # ranks are threads of this process
        assert main(["verify", "--transport", "thread", "--strategy", "naive"]) == 1
    assert "FAIL naive" in capsys.readouterr().out
