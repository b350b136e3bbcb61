"""The mutants: every one applies, is small and is killed, and the killer says why."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from minidist.cli import main
from minidist.course import mutant_tests, mutants, mutation_testing
from minidist.course.mutants import Mutant
from minidist.course.pytest_server import Server
from minidist.verify.mistakes import register
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.register import mistakes

ROOT = Path(__file__).parents[2]
SOME = ["no_all_reduce", "unstashed_weights"]  # the promises exact and replayed; -m slow: all
GRADIENT = Edit(
    "data_parallel/naive.py:all_reduce_gradients",
    'group.all_reduce(gradient(p), "sum", label=p.name)',
    "group.all_reduce(gradient(p), label=p.name)",
)
HARMLESS = Mutant("harmless", (GRADIENT,), family="data parallelism")
FEW = ["tests/test_rng.py::test_the_reference_is_split_mix_64"]


@pytest.mark.parametrize("name", mutants.names())
def test_a_mutant_applies_is_small_and_has_its_lines(name):
    mutant = mutants.load(name)
    lines = mutant.diff().splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert 1 <= max(len(added), len(removed)) <= 5
    for words in (mutant.title, mutant.seen, mutant.symptom):
        assert 10 <= len(words) <= 120 and not words.endswith(".")
    for path, source in mutant.files().items():
        compile(source, path, "exec")


def test_there_are_mutants_of_every_family():
    every = [mutants.load(name) for name in mutants.names()]
    families = {mutant.family for mutant in every}
    assert len(every) >= 25 and families >= set(mutant_tests.FAMILIES) - {"collective functions"}
    assert all(mistake.family for mistake in mistakes().values() if mistake.diagnosis)


def test_every_test_of_the_list_is_there_and_all_meet_the_same_ones():
    everything = set()
    for family in mutant_tests.FAMILIES:
        batches = replace(HARMLESS, family=family).batches([])
        met = {test for batch in batches for test in batch}
        everything.add(frozenset(test for test in met if "::" not in test))
        for test in met:
            assert (ROOT / test.partition("::")[0]).exists(), test
    assert len(everything) == 1
    usual = HARMLESS.batches([])
    assert replace(HARMLESS, killed_by="a/b.py::c").batches([]) == [["tests/a/b.py::c"], *usual]
    known = {mistake.killed_by for mistake in mistakes().values()} - {""}
    for test in (*mutant_tests.TIMING, *known):
        path, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}" in (ROOT / "tests" / path).read_text(), test


def test_single_device_tests_run_where_they_could_be_affected():
    assert "imports data_parallel/naive.py" in HARMLESS.why_single_device_tests_pass()
    inside = replace(HARMLESS, edits=(Edit("nn/linear.py:Linear.forward", "pass"),))
    assert inside.why_single_device_tests_pass() is None
    assert inside.batches(["a test"])[0] == ["a test"]
    wrong = replace(inside, killed_by="nn/test_linear.py::test")
    assert wrong.wrong_everywhere and wrong.why_single_device_tests_pass()
    assert wrong.batches([])[0] == ["tests/nn/test_linear.py::test"]


def test_a_mutant_meets_the_single_device_tests_that_call_what_it_changes(monkeypatch):
    place = "nn/mlp.py:Residual.forward", "y = layer(y, randomness)"
    harmless = replace(HARMLESS, edits=(Edit(place[0], "y = layer(y)", place[1]),))
    wrong = replace(HARMLESS, name="wrong", edits=(Edit(place[0], "y = layer(y) + 1.0", place[1]),))
    met = []
    files = ["tests/nn/test_conv.py", "tests/nn/test_residual.py"]
    monkeypatch.setattr(mutation_testing, "SINGLE_DEVICE", files)
    monkeypatch.setattr(Mutant, "batches", lambda self, single: met.append(single) or [single])
    rows = {row["name"]: row for row in mutation_testing.judge([harmless, wrong])}
    adds = "tests/nn/test_residual.py::test_a_residual_layer_adds_its_input_to_what_its_layers_give"
    assert met[0] == met[1] and adds in met[0]
    assert 1 < len(met[0]) and {test.partition("::")[0] for test in met[0]} == {files[1]}
    assert rows["harmless"]["killed_by"] is None and rows["wrong"]["killed_by"] == adds


def test_some_mutants_are_killed_by_the_command_and_the_numbers_say_why():
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "minidist", "mutants", "--json"]
    command += [f"--name={name}" for name in SOME]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, timeout=100)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody has open
        while piece := os.read(ours, 4096):  # no read returns more
            said += piece
    os.close(ours)
    assert b"2/2" in said
    assert done.returncode == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(rows) == set(SOME)
    for name, row in rows.items():
        assert row["killed_by"].startswith(mutant_tests.CERTIFICATE)
        assert mistakes()[name].diagnosis in row["diagnosis"], row
        assert "differs on rank" in row["diagnosis"]
        assert row["single_device"] and row["seen"] and row["symptom"] and row["title"]


@pytest.mark.parametrize("raised", ["minidist.errors.WrongInput: [2]", "TypeError: [2]"])
def test_the_diagnosis_is_what_the_rank_raised(raised):
    failure = Element("failure", message="minidist.errors.RankFailed: rank 0 failed:\nmore")
    failure.text = f"E   minidist.errors.RankFailed: rank 0 failed:\nE     x.py\nE   {raised}\nx.py"
    assert mutation_testing.failure_message(failure).endswith(f"rank 0 failed: {raised}")


def test_what_no_test_kills_survives_and_that_is_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "load", lambda name: HARMLESS)
    monkeypatch.setattr(Mutant, "batches", lambda self, single: [FEW, FEW])
    assert main(["mutants", "--name", "harmless"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == ["harmless  SURVIVED", "mutants: 1, harmless SURVIVED"]


def test_a_patch_in_words_and_as_a_diff(capsys):
    assert main(["mutants", "--show", "no_all_reduce"]) == 0
    out = capsys.readouterr().out
    call = "group.all_reduce(gradient(p), label=p.name)"
    assert f"\n-        p.grad = {call}\n+        p.grad = gradient(p)\n" in out
    assert "jingyaogong/minimind#853" in out and "--- a/minidist/data_parallel/naive.py" in out


def test_what_is_no_mutant_is_refused(monkeypatch, capsys, tmp_path):
    assert main(["mutants", "--name", "nothing"]) == 2
    assert "unknown mutant 'nothing'; choose one of " in capsys.readouterr().err
    for words, message in {
        "": r"mutant m needs a line 'title'",
        'title = "t"\nseen = "s"': r"mutant m needs a line 'symptom'",
        'title = "t"\nseen = "s"\nsymptom = "s"': "family is one of data parallelism, ",
    }.items():
        edit = 'function = "rng.py:f"\nby = "0"\nfamily = "none"\n'
        (tmp_path / "wrong.toml").write_text(f"[m]\n{edit}{words}")
        mistakes.cache_clear()
        monkeypatch.setattr(register, "mistakes", lambda: mistakes(tmp_path))
        with pytest.raises(ValueError, match=message):
            mutants.load("m")
    monkeypatch.setattr(mutation_testing, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="judged by the tests of a checkout"):
        next(mutation_testing.judge([HARMLESS]))


def test_a_run_that_takes_too_long_is_ended(monkeypatch):
    servers = []
    monkeypatch.setattr(mutation_testing, "LIMIT", 0.0)
    monkeypatch.setattr(
        mutation_testing, "Server", lambda root: servers.append(Server(root)) or servers[-1]
    )
    two = [HARMLESS, replace(HARMLESS, name="another")]
    for row in mutation_testing.judge(two, at_once=1, tests=FEW):
        assert row["killed_by"] is None and row["diagnosis"] == "no verdict after 0 s"
    assert len(servers) == 2 and not any(server.process.poll() is None for server in servers)


@pytest.mark.parametrize("kind, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_or_sigterm_ends_all_runs_and_leaves_nothing(tmp_path, kind, status):
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "minidist", "mutants", "--name", "no_all_reduce"]
    running = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 30
    while not list(tmp_path.glob("minidist-mutants-*/*/output.txt")) and time.monotonic() < end:
        time.sleep(0.02)
    running.send_signal(kind)
    _, err = running.communicate(timeout=30)
    assert running.returncode == status and ("interrupted" in err) == (kind is signal.SIGINT)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_killed_and_says_what_it_should(capsys):
    assert main(["mutants", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == mutants.names()
    for name, row in rows.items():
        if not mutants.load(name).wrong_everywhere:
            assert not row["killed_by"].startswith(tuple(mutant_tests.SINGLE_DEVICE))
        assert row["diagnosis"] and mistakes()[name].diagnosis in row["diagnosis"], row
        by = mistakes()[name].killed_by
        assert row["killed_by"].startswith(f"tests/{by}" if by else mutant_tests.CERTIFICATE), row


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_reference_survives_everything_and_a_mutant_all_tests_of_a_single_device():
    chosen = [mutants.load(name) for name in mutants.names()]
    alone = [mutant for mutant in chosen if not mutant.why_single_device_tests_pass()]
    batches = [mutant_tests.SINGLE_DEVICE, *HARMLESS.batches([])]
    rows = [
        *mutation_testing.judge(alone, tests=mutant_tests.SINGLE_DEVICE),
        *mutation_testing.judge([HARMLESS], tests=[test for batch in batches for test in batch]),
    ]
    assert len(rows) > 5 and not [row for row in rows if row["killed_by"] or row["diagnosis"]]
