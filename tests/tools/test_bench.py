"""The benchmark's arithmetic; what it measures is measured by `minidist bench`, not here."""

import importlib.util

from minidist.tools import bench_comm


def test_a_ratio_is_the_median_of_the_ratios_within_rounds():
    found = [{"ours": {"x": a}, "peer": {"x": b}} for a, b in [(1.0, 2.0), (9.0, 3.0), (2.0, 2.0)]]
    row = bench_comm._row("label", found, "x", "peer", 0.5)
    assert (row["ratio"], row["ours_ms"], row["peer_ms"]) == (1.0, 2000.0, 2000.0)


def test_a_missing_peer_is_said_and_not_guessed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_comm._mpi(2)() is None and bench_comm._gloo("gloo", 2)() is None
    row = bench_comm._row("label", [{"ours": {"x": 1.0}, "MPICH": None}], "x", "MPICH", 0.5)
    assert row["ratio"] is None and row["note"] == "MPICH is not installed"
    assert "MPICH is not installed" in bench_comm.table([row])


def test_the_table_has_a_line_per_row():
    rows = [bench_comm._plain("4 ranks up", 0.5, 1.0)]
    assert bench_comm.table(rows).splitlines()[1].split()[:5] == [
        "4",
        "ranks",
        "up",
        "500.000",
        "ms",
    ]
