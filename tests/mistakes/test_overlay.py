"""minidist with files replaced, and the tests that run against it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.verify.mistakes.overlay import BUILT_FROM, PACKAGE, build, is_built, replaced
from minidist.verify.mistakes.register import find

ROOT = Path(__file__).parents[2]
NAIVE = "data_parallel/naive.py"
SOURCE = (PACKAGE / NAIVE).read_text(encoding="utf-8")
THREADS = "tests/data_parallel/test_naive.py::test_small_integers_give_exactly_the_same_bits"
PROCESSES = "tests/verify/test_equivalence.py::test_every_strategy_keeps_its_promise[naive]"


def test_a_tree_is_the_package_but_for_what_is_replaced_or_left_out(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    build(first, {NAIVE: "changed = True\n"}, leave_out=("observe/pages", "hybrid.py"))
    there = {p.relative_to(first / "minidist") for p in first.rglob("*.py")}
    want = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")}
    left_out = {p for p in want if p.is_relative_to("observe/pages")} | {Path("hybrid.py")}
    assert there == want - left_out
    assert replaced(first)[NAIVE] == "changed = True\n"
    assert (first / "minidist" / BUILT_FROM).read_text() == str(ROOT)
    build(second, {NAIVE: "changed again\n"}, linked=first)
    assert is_built(first) and is_built(second) and not is_built(tmp_path)
    assert (first / "minidist" / NAIVE).read_text() == "changed = True\n"
    assert (second / "minidist" / NAIVE).read_text() == "changed again\n"
    assert (first / "minidist" / "rng.py").samefile(second / "minidist" / "rng.py")
    assert (second / "minidist" / BUILT_FROM).read_text() == str(first)
    assert (PACKAGE / NAIVE).read_text(encoding="utf-8") == SOURCE


def test_what_the_package_does_not_have_cannot_be_replaced(tmp_path):
    with pytest.raises(ValueError, match=r"minidist has no data_parallel/new\.py"):
        build(tmp_path / "new", {"data_parallel/new.py": ""})
    with pytest.raises(ValueError, match="has no folder minidist"):
        replaced(tmp_path)
    (tmp_path / "minidist" / "folder.py").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists already"):
        build(tmp_path, {})
    os.mkfifo(tmp_path / "minidist" / "pipe.py")
    (tmp_path / "minidist" / "endless.py").symlink_to("/dev/zero")
    assert replaced(tmp_path) == {}


def pytest_with(folder, *tests):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        [*command, "--impl", folder], cwd=ROOT, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("sound", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pytest_runs_against_another_implementation(tmp_path, sound):
    theirs = tmp_path / "minidist" / NAIVE
    theirs.parent.mkdir(parents=True)
    theirs.write_text(SOURCE if sound else find("no_all_reduce").files()[NAIVE])
    run = pytest_with(tmp_path, THREADS, *[PROCESSES] * (not sound))
    assert f"minidist with {NAIVE} of {tmp_path}" in run.stdout
    assert run.returncode == (0 if sound else 1), run.stdout + run.stderr
    if not sound:  # on threads, and on processes
        assert all(test.split("::")[1] in run.stdout for test in (THREADS, PROCESSES))


def test_a_folder_that_is_none_is_a_usage_error(tmp_path):
    run = pytest_with(tmp_path / "nowhere", THREADS)
    assert run.returncode == 4 and "has no folder minidist" in run.stderr
