"""The benchmark's arithmetic; what it measures is measured by `minidist bench`, not here."""

import importlib.util
import json
import math
import os
import re
import sys
from functools import partial

import pytest

import minidist
from minidist.backend import why_no_gpu
from minidist.cli import main
from minidist.observe.bench import checkpoint, comm, mpi, pipelines, steps, table
from minidist.observe.bench import gpu as gpu_bench
from minidist.observe.bench.table import Peer, Rounds, line, slowest
from minidist.observe.step_parts import median_seconds
from tests.clocks import clock_of_a_gpu
from tests.comm.test_cluster import gone


def test_a_ratio_is_the_median_of_the_ratios_within_rounds():
    found = Rounds(
        {"ours": {"x": a}, "peer": {"x": b}} for a, b in [(1.0, 2.0), (9.0, 3.0), (2.0, 2.0)]
    )
    row = found.row("label", "x", "peer", 0.5)
    assert (row["ratio"], row["ours_ms"], row["peer_ms"]) == (1.0, 2000.0, 2000.0)


def test_a_missing_peer_is_said_and_not_guessed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(table, "mpiexec", lambda: "/bin/mpiexec")
    answer = table.peer("mpi4py", "bare", ranks=2)()
    assert answer.startswith("mpi4py not found")
    assert table.peer("torch", "gloo", "2")().startswith("PyTorch is not installed")
    assert table.peer("jax", "{}")() == "JAX is not installed: pip install jax"
    row = Rounds([{"ours": {"x": 1.0}, "MPICH": answer}]).row("label", "x", "MPICH", 0.5, note="a")
    assert row["ratio"] is None and row["note"] == f"a; {answer}"
    words = line(row).split()
    assert words[:5] == ["label", "CPU", "1000.000", "ms", "MPICH"] and "mpi4py" in words


@pytest.mark.parametrize("peer", [{"gpipe, m = 4": 10.0}, "PyTorch is not installed"])
def test_a_pipeline_is_held_against_one_process_two_cores_and_its_peer_round_by_round(peer):
    names = pipelines.ONE.format(4), pipelines.BOTH.format(4), "gpipe, m = 4, weights last"
    ours = [dict(zip(names, seconds, strict=True)) for seconds in ((8, 10, 5), (16, 20, 10))]
    found = Rounds({"ours": times, "PyTorch": peer} for times in ours)
    row = pipelines.compared(found, names[-1])
    assert row["name"] == names[-1] and row["note"].startswith("speed-up 1.60, at least 1.09")
    assert (row["ratio"] == 0.75) == (row["note"] == "speed-up 1.60, at least 1.09")
    assert (row["ratio"] is None) == row["note"].endswith("; PyTorch is not installed")


def a_round_under_mpiexec(seconds: float) -> dict:
    names = ["8 bytes", *(s + end for s in ("1 MB", "16 MB") for end in ("", ", new array"))]
    found = {"ours": dict.fromkeys([*names, *mpi.STEPS], seconds)}
    found["bare"] = dict.fromkeys(names, seconds / 2)
    return found | {"process": dict.fromkeys(mpi.STEPS, 1.0), "NuMPItron": "not installed"}


def test_the_rows_of_mpi_are_ratios_a_difference_and_what_is_missing():
    found = Rounds(a_round_under_mpiexec(seconds) for seconds in (10e-6, 20e-6, 90e-6))
    compared = {(row["name"], row["peer"]): row for row in mpi.compared(found, 4)}
    assert len(compared) == 9 and all("4 ranks" in name for name, _ in compared)
    small = compared["all_reduce 8 bytes, 4 ranks", "bare"]
    assert small["limit"] is None and small["note"] == "10.0 us more, at most 20"
    large = compared["all_reduce 1 MB, new array, 4 ranks", "bare"]
    assert (large["ratio"], large["limit"]) == (2.0, 1.1)
    assert compared["step, tensor parallel, 4 ranks", "process"]["ratio"] == 20e-6
    theirs = compared["step, data parallel, 4 ranks", "NuMPItron"]
    assert (theirs["ratio"], theirs["limit"], theirs["note"]) == (None, 0.3, "not installed")


def test_the_slowest_rank_counts():
    assert slowest([{"x": 1.0, "y": 4.0}, {"x": 2.0, "y": 3.0}]) == {"x": 2.0, "y": 4.0}


def test_bench_mpi_without_mpiexec_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "mpi"]) == 2
    errors = capsys.readouterr().err
    assert re.fullmatch("minidist: mpiexec .* not found: pip install 'minidist\\[mpi\\]'\n", errors)


def test_ranks_under_mpiexec_that_fail_are_an_error_with_their_own_words():
    fails = [sys.executable, "-I", "-S", "-c", "raise ValueError('no')"]
    with pytest.raises(RuntimeError, match=r"exit status 1\n(?s:.*)ValueError: no"):
        table.printed_by(fails)


@pytest.mark.slow
@pytest.mark.skipif(table.why_no_mpi() is not None, reason=str(table.why_no_mpi()))
def test_bench_mpi_measures_every_row_or_says_what_is_missing(capsys):
    assert main(["bench", "mpi", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["peer"] for row in rows] == ["bare"] * 5 + ["process"] * 2 + ["NuMPItron"] * 2
    assert all(math.isfinite(row["ours_ms"]) and row["ours_ms"] > 0 for row in rows)
    assert all(row["ratio"] > 0 for row in rows[:-2])
    assert all((row["ratio"] is None) == bool(row["note"]) for row in rows[-2:])


SMALL = "width 8 depth 2 heads 2 context 4 batch 2 vocab 7 product 4 megabytes 1".split()
SMALL = [f"--{word}" if word.isalpha() else word for word in SMALL]


@pytest.mark.gpu
def test_bench_gpu_times_every_row_by_the_clock_of_the_device(device_bench, capsys):
    assert main(["bench", "gpu", "--rounds", "2", "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)
    steps, products = ["MLP step", "Transformer step"], ["product, float32", "product, float16"]
    sums = [f"all_reduce 1 MB, {ranks} ranks" for ranks in (2, 4)]
    asked = [f"{name} asks for" for name in steps]
    assert [row["name"] for row in rows] == [*steps, *products, *asked, *sums]
    timed = [row for row in rows if row["name"] not in asked]
    assert [row["ours_ms"] for row in timed] == pytest.approx([250.0] * 6)
    assert [row["ratio"] for row in timed[-2:]] == [1.0, 1.0]
    assert all(
        row["note"].startswith("5.12e-10 TFLOP/s") for row in rows if "product" in row["name"]
    )
    assert all("copies to the GPU" in line(row) for row in rows if row["name"] in asked)


@pytest.fixture
def device_bench(gpu, monkeypatch):
    """Let the bench run on threads, by a clock that nobody may read before all is done."""
    monkeypatch.setattr(gpu_bench, "run", partial(minidist.run, transport="thread"))
    monkeypatch.setattr(gpu_bench, "clock", clock_of_a_gpu)
    monkeypatch.setattr(gpu_bench, "asks_for", lambda step: step() or gpu_bench.in_words(SEEN))


SEEN = [("Memcpy HtoD (Pageable -> Device)", True), ("elementwise", True), ("gemm", True)]
SEEN += [("cudaStreamSynchronize", False), ("cuLaunchKernel", False), ("Memcpy DtoH", True)]
SEEN += [("cudaDeviceSynchronize", False)]


def test_what_a_step_asks_of_a_gpu_is_in_words_what_the_profiler_has_seen():
    words = "1 copies to the GPU, 1 to the host, 1 waits, 2 launches"
    assert gpu_bench.in_words(SEEN) == words
    with pytest.raises(ValueError, match="has seen no work of the GPU"):
        gpu_bench.in_words([name for name in SEEN if not name[1]])


def test_ranks_that_share_no_memory_of_a_gpu_have_one_time_and_say_why():
    def row(ranks):
        round = gpu_bench.shared_and_staged(ranks)
        return Rounds([round]).row("label", "all_reduce", "staging")

    alone = row([{"staging": 2.0}, {"staging": 3.0}])
    assert (alone["ours_ms"], alone["ratio"]) == (3000.0, None) and "cannot share" in alone["note"]
    shared = row([{"staging": 2.0, "all_reduce": 1.0}, {"staging": 3.0, "all_reduce": 1.5}])
    assert (shared["ours_ms"], shared["ratio"], shared["note"]) == (1500.0, 0.5, "")


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_bench_gpu_without_a_gpu_says_why_in_one_line(capsys):
    assert main(["bench", "gpu"]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch("minidist: there is no GPU to measure. CuPy .*\n", printed.err)
    assert printed.out == ""


FAULTS = {
    "raise ImportError('libcudart.so')": "failed: ImportError: libcudart.so",
    "import sys; sys.exit(3)": "failed: exit status 3",
    "import os; os.abort()": "failed: exit status -6",
    "import time; time.sleep(60)": "no answer within 0.5 s",
    "print()": "failed: its last line is no JSON object: ''",
    "print('{}'); print('good bye')": "failed: its last line is no JSON object: 'good bye'",
    "print([1.0])": "failed: its last line is no JSON object: '[1.0]'",
    "print('[' * 100_000)": f"failed: its last line is no JSON object: '{'[' * 147}...'",
}


@pytest.mark.parametrize("code", FAULTS)
def test_whatever_a_peer_does_its_answer_says_so(monkeypatch, code):
    monkeypatch.setattr(table, "TIMEOUT", 0.5 if "sleep" in code else 60)
    assert Peer([sys.executable, "-I", "-S", "-c", code])() == FAULTS[code]


def test_a_command_that_cannot_be_started_is_an_answer_too(tmp_path):
    assert Peer([str(tmp_path / "mpiexec")])().startswith("failed: [Errno 2] No")


def test_a_good_answer_is_its_last_line():
    code = "print('a warning'); print('{\"step\": 0.5}')"
    command = [sys.executable, "-I", "-S", "-c", code]
    assert Peer(command)() == {"step": 0.5}


def test_a_peer_that_hangs_is_ended_with_all_its_processes(monkeypatch, tmp_path):
    """Its first process has ended already; another one holds the pipes."""
    monkeypatch.setattr(table, "TIMEOUT", 1)
    note = tmp_path / "pid"  # written by a shell, which imports nothing first
    command = ["sh", "-c", 'sleep 60 & echo $! > "$0"', str(note)]
    assert Peer(command)() == "no answer within 1 s"
    assert gone([int(note.read_text())])


def test_the_steps_of_pytorch_have_a_time_each():
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.observe.bench import torch_peers

    small = {"vocab": 7, "width": 8, "heads": 2, "depth": 1, "context": 4, "batch": 2}
    works = {"words": ("transformer_step", small), "mlp": ("mlp_step", {"widths": [4, 3]})}
    times = torch_peers.steps("cpu", json.dumps(works))
    assert times.keys() == works.keys() and all(seconds > 0 for seconds in times.values())


def test_a_peer_that_has_failed_is_not_run_again(tmp_path):
    code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); raise ValueError('no')"
    peer = Peer([sys.executable, "-I", "-S", "-c", code])
    assert [peer() for _ in range(3)] == ["failed: ValueError: no"] * 3
    assert (tmp_path / "runs").read_text() == "x"


@pytest.fixture
def tiny(monkeypatch):
    """Let every suite have next to nothing to do, on ranks that are threads of this process."""
    threads = partial(minidist.Cluster, transport="thread")
    for suite in (comm, pipelines):
        monkeypatch.setattr(suite, "Cluster", threads)
    monkeypatch.setattr(table, "SETTLE", 0)
    monkeypatch.setattr(
        table, "median_seconds", lambda call, meet, *_: median_seconds(call, meet, 1)
    )
    monkeypatch.setattr(comm, "SIZES", {"64 KB": 64, "1 MB": 64})
    monkeypatch.setattr(comm, "WIDTHS", [6, 8, 4])
    monkeypatch.setattr(comm, "BATCH", 8)
    monkeypatch.setattr(comm, "POSITIONS", 8)
    for name, size in {"WIDTH": 8, "LAYERS": 2, "BATCH": 8}.items():
        monkeypatch.setattr(pipelines, name, size)
    small = {"vocab": 7, "width": 8, "heads": 2, "depth": 1, "context": 4, "batch": 2}
    works = {"words": ("transformer_step", small), "ops": ("chain_step", {"operations": 10})}
    monkeypatch.setattr(steps, "STEPS", works)


PEERS = {  # what a package does when it is imported, and what becomes of its rows
    "raises": ("raise ImportError('libcudart.so')", "failed: ImportError: libcudart.so"),
    "aborts": ("import os; os.abort()", "failed: exit status"),
    "hangs": ("import time; time.sleep(60)", "no answer within"),
    "prints": ("import os; print('rubbish', flush=True); os._exit(0)", "failed: its last line is"),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("aborts", "prints")))
        for name in PEERS
    ]
)
def fake_peers(request, monkeypatch, tmp_path):
    """Put packages and an mpiexec in front of those that are there; return their note."""
    code, note = PEERS[request.param]
    for package in ("torch", "jax", "mpi4py"):
        (tmp_path / package).mkdir()
        for name in ("__init__.py", "__main__.py"):
            (tmp_path / package / name).write_text(code)
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o700)
    # Not by PATH: a launcher beside Python comes before it, and may have words of its own.
    monkeypatch.setattr(table, "mpiexec", lambda: str(launcher))
    monkeypatch.syspath_prepend(tmp_path)
    places = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setattr(table, "TIMEOUT", 0.5 if request.param == "hangs" else 60)
    monkeypatch.setattr(table, "COMPILING", 1)
    return note


@pytest.mark.parametrize("suite", ["step", "comm", "pipeline"])
def test_a_peer_that_fails_costs_its_own_rows_a_note(tiny, fake_peers, capsys, suite):
    assert main(["bench", suite, "--rounds", "1", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["name"] != "machine"]
    assert all(math.isfinite(row["ours_ms"]) for row in rows)
    theirs = [row for row in rows if fake_peers in row["note"]]
    assert len(theirs) == {"step": 3 + 1, "comm": 9 + 1, "pipeline": 8}[suite]
    assert not any(row["ratio"] for row in theirs)


def test_rows_are_printed_as_they_are_measured_and_are_not_lost(tiny, monkeypatch, capsys):
    def two_rows(rounds):
        yield first
        printed.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    printed = []
    first = Rounds([{"ours": {"x": 1e-3}}]).row("first", "x")
    monkeypatch.setattr(steps, "rows", two_rows)
    assert main(["bench"]) == 130 and printed[0].splitlines()[1].split()[:2] == ["first", "CPU"]
    assert main(["bench", "--json"]) == 130
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["first"]


def test_a_checkpoint_is_held_against_np_save_and_its_step_against_one_without(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "ELEMENTS", 100)
    own = {"ours": (0.2, 0.0), "plain": (1.0, 0.9), "save": (2.0, 2.0)}
    times = {who: dict(zip(checkpoint.WAYS, each, strict=True)) for who, each in own.items()}
    monkeypatch.setattr(checkpoint, "steps_and_saves", lambda *_: [times] * 3)
    monkeypatch.setattr(checkpoint, "Cluster", partial(minidist.Cluster, transport="thread"))
    save, load, delay, alone = checkpoint.rows(rounds=1)
    assert save["name"] == "save 0 MiB" and min(save["ratio"], load["ratio"]) > 0
    assert delay["ratio"] == pytest.approx(0.1) and delay["limit"] == 0.05
    assert alone["ratio"] == pytest.approx(0)
    assert line(delay).endswith("a step takes 1000 ms")
    assert not any(tmp_path.iterdir())


def test_what_a_save_takes_from_a_step_is_measured_in_three_times(monkeypatch, tmp_path, cluster):
    for name, size in {"WIDTH": 32, "BATCH": 16}.items():
        monkeypatch.setattr(checkpoint, name, size)
    (found,) = cluster(1, "thread").run(checkpoint.steps_and_saves, tmp_path, 1)
    assert [list(answer) for answer in found[0].values()] == [list(checkpoint.WAYS)] * 3
    assert all(found[0][who][way] > 0 for who in ("plain", "save") for way in checkpoint.WAYS)
