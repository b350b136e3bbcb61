"""The benchmark's arithmetic and its rows; what it measures is measured by `minidist bench`.

What runs other packages, or whole suites, is slow.
"""

import importlib.util
import json
import math
import os
import re
import sys
import time
from functools import partial

import numpy as np
import pytest

import minidist
from minidist import nn, optim
from minidist.backend import why_no_gpu
from minidist.cli import main
from minidist.observe.bench import checkpoint, comm, pipelines, steps, table
from minidist.observe.bench import gpu as gpu_bench
from minidist.observe.bench.table import HEAD, Peer, Rounds, line, markdown
from minidist.observe.step_parts import ProcessClock, median_seconds
from tests.clocks import clock_of_a_gpu
from tests.comm.test_cluster import gone

SMALL = {"vocab": 7, "width": 16, "heads": 2, "depth": 2, "context": 6, "batch": 4}
PEERS = ["PyTorch", "torch.compile", "JAX"]


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


def test_the_table_has_a_line_per_workload_and_a_dash_where_a_peer_is_missing():
    found = Rounds([{"ours": {"x": 0.08, "x: products": 0.06}, "PyTorch": {"x": 0.1}, "JAX": "no"}])
    rows = [steps.of_products(found, "x", None, 61_000_000)]
    rows += [found.row("x", "x", peer) for peer in ("PyTorch", "JAX")]
    text = markdown([steps.remark("machine", "a processor"), *rows])
    assert text.splitlines() == [
        "Measured on a processor:",
        "",
        f"| {' | '.join(HEAD)} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| x | 80.0 ms | 60.0 ms | 75 % | 100 ms, 0.80 | - | - | 61 MB |",
    ]


@pytest.fixture
def measured(monkeypatch):
    """Return the rows of a small Transformer and of a chain, whose peers say 1 s to everything."""

    def peer(package, *work, **_):
        works = json.loads(work[-1])
        asked.append(works)
        return lambda: dict.fromkeys(works, 1.0)

    asked = []
    works = {"words": ("transformer_step", SMALL), "ops": ("chain_step", {"operations": 10})}
    monkeypatch.setattr(steps, "STEPS", works)
    monkeypatch.setattr(steps, "peer", peer)
    monkeypatch.setattr(table, "SETTLE", 0)
    monkeypatch.setattr(
        table, "median_seconds", lambda call, meet, *_: median_seconds(call, meet, 5)
    )
    return list(steps.rows(rounds=3)), asked


def test_a_step_has_a_row_for_its_products_and_one_for_each_peer(measured):
    machine, *others = measured[0]
    assert machine["name"] == "machine" and "openblas" in machine["note"].lower()
    names = [(row["name"], row["peer"]) for row in others]
    assert names == [*(("words", peer) for peer in ["products", *PEERS]), ("ops", "PyTorch")]
    products, *compared = others[:-1]
    assert 0 < products["peer_ms"] < products["ours_ms"]
    assert products["note"].startswith(f"products {100 / products['ratio']:.0f} %, peak 0 MB")
    assert all(row["ratio"] == pytest.approx(row["ours_ms"] / 1e3) for row in compared)
    eager, compiled, jax = measured[1]
    assert list(eager) == ["words", "ops"] and list(compiled) == list(jax) == ["words"]
    assert compiled["words"] == ["transformer_step", SMALL | {"compiled": True}]
    assert eager["words"] == jax["words"] == ["transformer_step", SMALL]


def test_a_step_is_timed_by_what_it_does_and_not_by_what_it_waits_for():
    clock = ProcessClock()
    assert median_seconds(lambda: time.sleep(0.1), repeats=1, clock=clock) < 0.05
    assert median_seconds(lambda: sum(range(1_000_000)), repeats=1, clock=clock) > 0.001


def test_the_peak_is_what_a_step_holds_at_once_with_what_stays():
    stays, passes = 3_000_000, 5_000_000

    def prepare():
        np.ones(3 * passes, np.uint8)  # no part of a step
        kept = np.ones(stays, np.uint8)
        return lambda: (kept.sum(), np.ones(passes, np.uint8))[0]

    assert steps.peak_bytes(prepare) == pytest.approx(stays + passes, rel=0.01)


@pytest.mark.slow
def test_under_torch_compile_it_is_the_whole_loss_that_is_compiled(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.observe.bench import torch_peers

    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f()) or f)
    make = partial(torch_peers.transformer_step, **SMALL)
    make()()
    assert not compiled
    make(compiled=True)()
    assert [loss.ndim for loss in compiled] == [0]


@pytest.mark.parametrize("name", ["mlp_step", "transformer_step"])
def test_jax_computes_our_losses_step_by_step(name):
    pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    from minidist.observe.bench import jax_peers

    random = np.random.default_rng(0)
    if name == "mlp_step":
        more = {"widths": (9, 8, 8, 5), "rows": 6}
        inputs = random.standard_normal((6, 9), np.float32)
        targets, model = random.integers(0, 5, 6), nn.MLP((9, 8, 8, 5))
        optimizer = optim.SGD(model.parameters(), lr=1e-3)
    else:
        more = SMALL
        inputs, targets = random.integers(0, 7, (2, 4, 6))
        model = nn.Transformer(*(SMALL[k] for k in ("vocab", "width", "heads", "depth", "context")))
        optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    theirs = getattr(jax_peers, name)(**more)
    for _ in range(4):
        loss = nn.cross_entropy(model(inputs), targets)
        assert float(theirs()) == pytest.approx(float(loss.data), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_bench_mpi_without_mpiexec_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "mpi"]) == 2
    errors = capsys.readouterr().err
    assert re.fullmatch("minidist: mpiexec .* not found: pip install 'minidist\\[mpi\\]'\n", errors)


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_bench_gpu_without_a_gpu_says_why_in_one_line(capsys):
    assert main(["bench", "gpu"]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch("minidist: there is no GPU to measure. CuPy .*\n", printed.err)
    assert printed.out == ""


@pytest.mark.slow
@pytest.mark.skipif(table.why_no_mpi() is not None, reason=str(table.why_no_mpi()))
def test_bench_mpi_measures_every_row_or_says_what_is_missing(capsys):
    assert main(["bench", "mpi", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["peer"] for row in rows] == ["bare"] * 5 + ["process"] * 2 + ["NuMPItron"] * 2
    assert all(math.isfinite(row["ours_ms"]) and row["ours_ms"] > 0 for row in rows)
    assert all(row["ratio"] > 0 for row in rows[:-2])
    assert all((row["ratio"] is None) == bool(row["note"]) for row in rows[-2:])


OPTIONS = "width 8 depth 2 heads 2 context 4 batch 2 vocab 7 product 4 megabytes 1".split()
OPTIONS = [f"--{word}" if word.isalpha() else word for word in OPTIONS]


@pytest.mark.gpu
def test_bench_gpu_times_every_row_by_the_clock_of_the_device(device_bench, capsys):
    assert main(["bench", "gpu", "--rounds", "2", "--json", *OPTIONS]) == 0
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


ANSWERS = {
    "print('a warning'); print('{\"step\": 0.5}')": {"step": 0.5},
    "raise ImportError('libcudart.so')": "failed: ImportError: libcudart.so",
    "import sys; sys.exit(3)": "failed: exit status 3",
    "import os; os.abort()": "failed: exit status -6",
    "import time; time.sleep(60)": "no answer within 0.5 s",
    "print()": "failed: its last line is no JSON object: ''",
    "print('{}'); print('good bye')": "failed: its last line is no JSON object: 'good bye'",
    "print([1.0])": "failed: its last line is no JSON object: '[1.0]'",
    "print('[' * 100_000)": f"failed: its last line is no JSON object: '{'[' * 147}...'",
}


def test_whatever_a_peer_does_its_answer_says_so_and_it_is_not_run_again(monkeypatch, tmp_path):
    for code, answer in ANSWERS.items():
        monkeypatch.setattr(table, "TIMEOUT", 0.5 if "sleep" in code else 60)
        assert Peer([sys.executable, "-I", "-S", "-c", code])() == answer
    assert Peer([str(tmp_path / "mpiexec")])().startswith("failed: [Errno 2] No")
    fails = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); raise ValueError('no')"
    command = [sys.executable, "-I", "-S", "-c", fails]
    peer = Peer(command)
    assert [peer() for _ in range(3)] == ["failed: ValueError: no"] * 3
    assert (tmp_path / "runs").read_text() == "x"
    with pytest.raises(RuntimeError, match=r"exit status 1\n(?s:.*)ValueError: no"):
        table.printed_by(command)


def test_a_peer_that_hangs_is_ended_with_all_its_processes(monkeypatch, tmp_path):
    """Its first process has ended already; another one holds the pipes."""
    monkeypatch.setattr(table, "TIMEOUT", 1)
    note = tmp_path / "pid"  # written by a shell, which imports nothing first
    command = ["sh", "-c", 'sleep 60 & echo $! > "$0"', str(note)]
    assert Peer(command)() == "no answer within 1 s"
    assert gone([int(note.read_text())])


@pytest.mark.slow
def test_the_steps_of_pytorch_have_a_time_each():
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    from minidist.observe.bench import torch_peers

    small = {"vocab": 7, "width": 8, "heads": 2, "depth": 1, "context": 4, "batch": 2}
    works = {"words": ("transformer_step", small), "mlp": ("mlp_step", {"widths": [4, 3]})}
    times = torch_peers.steps("cpu", json.dumps(works))
    assert times.keys() == works.keys() and all(seconds > 0 for seconds in times.values())


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


@pytest.fixture
def fake_peers(monkeypatch, tmp_path):
    """Put packages and an mpiexec in front of those that are there; return their note."""
    code, note = "raise ImportError('libcudart.so')", "failed: ImportError: libcudart.so"
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
    monkeypatch.setattr(table, "COMPILING", 1)
    return note


@pytest.mark.slow
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
