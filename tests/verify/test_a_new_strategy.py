"""Adding a strategy takes its file, its record and a wrong version, and no other line anywhere.

A toy is added to a copy of the checkout; the commands that run there know nothing of it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRATEGY = '''
"""Gradients are summed on rank 0, and sent back from there."""

from minidist.data_parallel.replicated import DataParallel


def sum_on_rank_0(model, group):
    for name, p in model.named_parameters().items():
        total = group.reduce(p.grad, label=name)
        p.grad = group.broadcast(total, label=name)


class ThroughRank0(DataParallel):
    def sum_gradients(self):
        sum_on_rank_0(self.model, self.group)
'''
RECORD = '''
"""The toy."""

from minidist.data_parallel.through_rank_0 import ThroughRank0
from minidist.planning.costs import strategies as costs
from minidist.verify.strategies.cases import small_cases
from minidist.verify.strategies.record import Costs, Strategy

STRATEGIES = [
    Strategy(
        name="through_rank_0",
        idea="gradients are summed on one rank",
        term="主节点求和",
        paper="Author et al. 2026, section 1",
        family="toys",
        files=("data_parallel/through_rank_0.py",),
        lesson="03_data_parallel",
        make=ThroughRank0,
        promise="exact",
        cases=small_cases,
        costs=Costs(bytes=costs.data_parallel_bytes),
    )
]
'''
MISTAKE = """
[averaged_on_rank_0]
title = "The sum is divided by the number of ranks"
seen = "in this test"
symptom = "Training is slower with more ranks"
family = "toys"
function = "data_parallel/through_rank_0.py:sum_on_rank_0"
replace = "group.broadcast(total, label=name)"
by = "group.broadcast(None if total is None else total / group.size, label=name)"
"""
COSTS = """
from minidist import Cluster
from minidist.observe import costs
from minidist.verify.strategies import STRATEGIES

toy = STRATEGIES["through_rank_0"]
with Cluster(toy.most_ranks) as ranks:
    found = costs.measure_costs(toy.name, costs.example(toy.name), ranks)
    naive = costs.measure_costs("naive", costs.example(toy.name), ranks)
assert [cost.held for cost in found] == [cost.held for cost in naive]
assert sum(cost.sent for cost in found) == sum(cost.sent for cost in naive)
print(*costs.rows({toy.name: found})[0], sep=", ")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the checkout to which the toy has been added."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("minidist", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for path, text in {
        "data_parallel/through_rank_0.py": STRATEGY,
        "verify/strategies/toy.py": RECORD,
        "verify/mistakes/toy.toml": MISTAKE,
    }.items():
        (copy / "minidist" / path).write_text(text, encoding="utf-8")
    return copy


@pytest.fixture
def run(checkout):
    """Return a function that runs Python in the copy, and returns what it prints."""

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_is_verified(run):
    rows = json.loads(run("-m", "minidist", "verify", "--strategy", "through_rank_0", "--json"))
    assert len(rows) == 20 and all(row["ok"] for row in rows)
    assert {row["ranks"] for row in rows} == {1, 2, 3, 4}


def test_it_is_listed_among_those_of_its_lesson_and_costed(run):
    table = run("-m", "minidist", "strategies", "--markdown").splitlines()
    names = [row.split("`")[1] for row in table[2:]]
    assert names[:3] == ["naive", "bucketed", "through_rank_0"]
    assert "gradients are summed on one rank (主节点求和)" in table[4]
    assert run("-c", COSTS).startswith("through_rank_0, 2 x 16 x 8, ")


@pytest.mark.slow
def test_its_wrong_version_is_found_by_its_certificate_and_diagnosed(run):
    said = run("-m", "minidist", "mutants", "--name", "averaged_on_rank_0", "--json")
    (row,) = json.loads(said)
    assert row["killed_by"].endswith("test_every_strategy_keeps_its_promise[through_rank_0]")
    assert "1 / number of ranks: 1/N applied twice" in row["diagnosis"]
