"""Mistakes, and faults of a worker or a case: each must turn `verify` red, on real processes, and
the row must say where and by how much. verify/test_every_mistake.py has the other mistakes.

`verify` is `check` for every case, on ranks of its own; here the ranks stay up from test to test.
"""

from dataclasses import replace

import pytest

from minidist import nn
from minidist.verify import strategies
from minidist.verify.equivalence import check, find, worker_of
from tests.planted import mistaken, planted

naive_worker = worker_of(find("naive"))


def own_count_of_targets(group, case, **options):
    """Every rank divides by its own targets that count; the means are weighted by examples."""

    def loss(logits, targets, reduction_size):
        own = max(1, nn.counted(targets)) / max(1, len(targets))
        return case.loss(logits, targets, own * len(case.targets))

    return naive_worker(group, replace(case, loss=loss), **options)


def moves_more_than_it_should(group, case, **options):
    """The gradients are right, but everything is sent once more."""
    outcome = naive_worker(group, case, **options)
    return replace(outcome, bytes=outcome.bytes + (8 if group.size > 1 else 0))


@pytest.fixture
def rows_with(monkeypatch, cluster):
    """Return a function: rows_with(fault, size) gives the rows of `verify` with a fault in it."""

    def rows(fault, size, name="naive"):
        sound = strategies.STRATEGIES[name]
        worker = mistaken(fault, worker_of(sound)) if isinstance(fault, str) else fault
        monkeypatch.setitem(strategies.STRATEGIES, name, replace(sound, worker=worker))
        return [check(name, case, size, cluster(size)) for case in sound.cases(size)]

    return rows


def test_every_row_turns_red_and_says_where_and_by_how_much(rows_with):
    for row in rows_with("no_all_reduce", 2):
        assert not row["ok"] and row["error"] > 1e-9, row
        assert "differs on rank" in row["detail"] and "got/want" in row["detail"]
        assert row["bytes"] == 0 < row["bytes_formula"] and "0 bytes moved" in row["detail"]


def test_wrong_bytes_are_red_though_the_gradients_are_right(rows_with):
    for row in rows_with(moves_more_than_it_should, 2):
        assert not row["ok"] and row["error"] <= 1e-9 and "bytes moved, not" in row["detail"]


def test_a_rank_that_counts_its_own_targets_is_red_where_they_are_padded_and_nowhere_else(
    rows_with,
):
    for row in rows_with(own_count_of_targets, 4):
        assert row["ok"] == ("padded" not in row["case"]), row
        if not row["ok"]:
            assert "means" in row["detail"] and "divided by its own number" in row["detail"]


def test_the_command_line_turns_red_as_well(capsys):
    from minidist.cli import main

    with planted("divided_by_ranks_twice"):  # ranks are threads of this process
        assert main(["verify", "--transport", "thread", "--strategy", "naive"]) == 1
    assert "FAIL naive" in capsys.readouterr().out
