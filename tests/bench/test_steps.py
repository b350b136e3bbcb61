"""A step beside its products and its peers: which rows there are, and what they say."""

import importlib.util
import json
import time
from functools import partial

import numpy as np
import pytest

from minidist import nn, optim
from minidist.observe.bench import steps, table
from minidist.observe.bench.table import HEAD, Rounds, markdown
from minidist.observe.step_parts import ProcessClock, median_seconds

SMALL = {"vocab": 7, "width": 16, "heads": 2, "depth": 2, "context": 6, "batch": 4}
PEERS = ["PyTorch", "torch.compile", "JAX"]


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


def test_a_peer_is_asked_for_what_it_has_and_only_one_compiles(measured):
    eager, compiled, jax = measured[1]
    assert list(eager) == ["words", "ops"] and list(compiled) == list(jax) == ["words"]
    assert compiled["words"] == ["transformer_step", SMALL | {"compiled": True}]
    assert eager["words"] == jax["words"] == ["transformer_step", SMALL]


def test_a_step_is_timed_by_what_it_does_and_not_by_what_it_waits_for():
    clock = ProcessClock()
    assert median_seconds(lambda: time.sleep(0.1), repeats=1, clock=clock) < 0.05
    assert median_seconds(lambda: sum(range(1_000_000)), repeats=1, clock=clock) > 0.001


def test_every_workload_has_aims():
    assert {function for function, _ in steps.STEPS.values()} == set(steps.AIMS)
    assert steps.AIMS["transformer_step"]["products"] == pytest.approx(1 / 0.75)


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


def test_the_peak_is_what_a_step_holds_at_once_with_what_stays():
    stays, passes = 3_000_000, 5_000_000

    def prepare():
        np.ones(3 * passes, np.uint8)  # no part of a step
        kept = np.ones(stays, np.uint8)
        return lambda: (kept.sum(), np.ones(passes, np.uint8))[0]

    assert steps.peak_bytes(prepare) == pytest.approx(stays + passes, rel=0.01)


def test_a_peer_that_compiles_has_longer(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    waits = [
        peer.patience
        for peer in (
            table.peer("torch", "steps"),
            table.peer("torch", "steps", compiles=True),
            table.peer("jax", "{}", compiles=True),
        )
    ]
    assert waits == [1, table.COMPILING, table.COMPILING]


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
