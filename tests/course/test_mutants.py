"""The mutants: every one applies, is small, and is killed by a test that says why."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.course import mutants
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.register import Mistake, mistakes, planted
from tests import grids

ROOT = Path(__file__).parents[2]
GRADIENT = Edit(
    "data_parallel/naive.py:all_reduce_gradients",
    'group.all_reduce(gradient(p), "sum", label=p.name)',
    "group.all_reduce(gradient(p), label=p.name)",
)
HARMLESS = Mistake("harmless", (GRADIENT,), family="data parallelism")
pytestmark = pytest.mark.slow


def test_a_mutant_is_planted_is_small_and_names_a_test_that_is_there():
    for mutant in map(mutants.load, mutants.names()):
        lines = mutant.diff().splitlines()
        changed = [[x for x in lines if re.match(rf"[{c}](?![+-]{{2}})", x)] for c in "+-"]
        assert 1 <= max(map(len, changed)) <= 5
        for words in (mutant.title, mutant.seen, mutant.symptom):
            assert 10 <= len(words) <= 120 and not words.endswith(".")
        with planted(mutant):
            pass
        for test in mutants.tests_of(mutant):
            path, _, name = test.partition("[")[0].partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), test


def test_every_diagnosis_of_the_register_is_a_mutants():
    assert all(mistake.family for mistake in mistakes().values() if mistake.diagnosis)


def test_mutants_are_killed_and_the_numbers_say_why(capsys):
    """Some of them, other ones at each commit; `minidist mutants` runs all."""
    some = {"no_all_reduce", *grids.some(mutants.names(), 5, "mutants")}
    assert main(["mutants", "--json", *(f"--name={name}" for name in some)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == some
    for row in rows:
        mutant = mistakes()[row["name"]]
        assert row["killed_by"].startswith(tuple(mutants.tests_of(mutant)))
        assert row["diagnosis"] and mutant.diagnosis in row["diagnosis"], row
        assert row["seen"] and row["symptom"] and row["title"]


def test_what_no_test_kills_survives_and_that_is_exit_status_1(monkeypatch, capsys):
    by = "test_rng.py::test_the_reference_is_split_mix_64"
    monkeypatch.setattr(mutants, "load", lambda name: replace(HARMLESS, killed_by=by))
    assert main(["mutants", "--name", "harmless"]) == 1
    assert "harmless  SURVIVED\nmutants: 1, harmless SURVIVED" in capsys.readouterr().out


def test_a_patch_in_words_and_as_a_diff(capsys):
    assert main(["mutants", "--show", "no_all_reduce"]) == 0
    out = capsys.readouterr().out
    call = "group.all_reduce(gradient(p), label=p.name)"
    assert f"\n-        p.grad = {call}\n+        p.grad = gradient(p)\n" in out
    assert "jingyaogong/minimind#853" in out and "--- a/minidist/data_parallel/naive.py" in out


def test_what_is_no_mutant_is_refused(monkeypatch, capsys, tmp_path):
    assert main(["mutants", "--name", "nothing"]) == 2
    assert "unknown mutant 'nothing'; choose one of " in capsys.readouterr().err
    whole = replace(HARMLESS, title="t", seen="s", symptom="s")
    for wrong, message in [
        (replace(whole, title=""), "needs a line 'title'"),
        (replace(whole, family="none"), "family is one of data parallelism, "),
    ]:
        monkeypatch.setattr(mutants, "mistakes", lambda wrong=wrong: {"harmless": wrong})
        with pytest.raises(ValueError, match=message):
            mutants.load("harmless")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="judged by the tests of a checkout"):
        mutants.judge([HARMLESS], print)
