"""The benchmark's arithmetic; what it measures is measured by `minidist bench`, not here."""

import importlib.util

from minidist.tools.bench import comm, pipelines


def test_a_ratio_is_the_median_of_the_ratios_within_rounds():
    found = [{"ours": {"x": a}, "peer": {"x": b}} for a, b in [(1.0, 2.0), (9.0, 3.0), (2.0, 2.0)]]
    row = comm._row("label", found, "x", "peer", 0.5)
    assert (row["ratio"], row["ours_ms"], row["peer_ms"]) == (1.0, 2000.0, 2000.0)


def test_a_missing_peer_is_said_and_not_guessed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert comm._mpi(2)() is None and comm.gloo_peer("gloo", 2)() is None
    row = comm._row("label", [{"ours": {"x": 1.0}, "MPICH": None}], "x", "MPICH", 0.5)
    assert row["ratio"] is None and row["note"] == "MPICH is not installed"
    assert "MPICH is not installed" in comm.table([row])


def test_the_table_has_a_line_per_row():
    rows = [comm._plain("4 ranks up", 0.5, 1.0)]
    assert comm.table(rows).splitlines()[1].split()[:5] == [
        "4",
        "ranks",
        "up",
        "500.000",
        "ms",
    ]


def test_every_stage_of_zero_can_be_timed_beside_plain_data_parallelism(monkeypatch, cluster):
    monkeypatch.setattr(comm, "WIDTHS", [6, 8, 4])
    monkeypatch.setattr(comm, "BATCH", 8)
    ways = ("plain", "zero_1", "zero_2", "zero_3")
    for times in cluster(2, "thread").run(comm.adamw_steps, ways):
        assert len(times) == 4 and min(times) > 0


def test_a_pipeline_is_held_against_one_process_two_cores_and_its_peer_round_by_round():
    found = [
        {"accumulate 4": 8.0, "both 4": 10.0, "gpipe 4 False": 5.0, "torch gpipe 4": 10.0},
        {"accumulate 4": 16.0, "both 4": 20.0, "gpipe 4 False": 10.0, "torch gpipe 4": 20.0},
    ]
    row = pipelines._row(found, "gpipe", 4, last=False)
    assert row["speedup"] == 1.6 and row["peer"] == 0.5
    assert abs(row["least"] - 0.85 * 2 * 4 / 5 * 0.8) < 1e-12
    assert pipelines.table([row]).splitlines()[1].split()[-4:] == [
        "ms",
        "1.60",
        "1.09",
        "0.50",
    ]


def test_without_pytorch_a_pipeline_has_no_peer():
    found = [{"accumulate 4": 8.0, "both 4": 10.0, "gpipe 4 True": 5.0}]
    row = pipelines._row(found, "gpipe", 4, last=True)
    assert row["peer"] is None and "PyTorch is not installed" in pipelines.table([row])
