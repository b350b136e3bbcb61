"""Pipelines that really run, beside what a simulator makes of their durations."""

import pytest

from minidist.pipeline_parallel import SCHEDULES
from minidist.tools import timeline
from minidist.tools.measure_pipeline import measure_pipeline
from minidist.tools.tracks import tracks

SIGNS = {"zb_h1": "FIW", "zb_h2": "FIW", "zb_v": "FIW", "pipedream": "FBU", "pipedream_2bw": "FBU"}


def chunks(schedule):
    return 2 if schedule in ("interleaved", "zb_v") else 1


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_is_measured_simulated_and_drawn(schedule):
    real = measure_pipeline(schedule, 2, 4, chunks(schedule), width=32, rows=2, repeats=3)
    assert len(real.makespans) == 3 and min(real.makespans) > 0
    assert {sign for sign, each in real.durations.items() if any(each)} == set(
        SIGNS.get(schedule, "FB")
    )
    assert {len(each) for each in real.durations.values()} == {2 * chunks(schedule)}
    assert 0 < real.overhead and 0 < real.latency
    assert list(tracks(real.log)) == [(0, "main"), (1, "main")]
    done = [name for e in real.log.events if e.category == "compute" for name in e.name.split()]
    assert sorted(done) == sorted(e.name for e in real.simulation.timeline.events)
    for log in (real.log, real.simulation.timeline):
        picture = timeline.text(log)
        assert log.unit == "s" and "F forward" in picture and "scaled: 1 column is" in picture
        assert ("lower case: chunk 1" in picture) == (chunks(schedule) == 2)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_on_a_gpu_a_schedule_is_measured_by_its_clock(schedule):
    real = measure_pipeline(schedule, 2, 3, width=8, rows=2, repeats=1, device="gpu")
    assert min(real.makespans) > 0 and list(tracks(real.log)) == [(0, "main"), (1, "main")]
    assert {sign for sign, each in real.durations.items() if any(each)} == set(
        SIGNS.get(schedule, "FB")
    )


def test_one_rank_sends_nothing():
    real = measure_pipeline("gpipe", 1, 2, width=32, rows=2, repeats=1)
    assert (real.overhead, real.latency) == (0, 0)
    assert real.simulation.makespan == pytest.approx(2 * sum(real.durations[k][0] for k in "FB"))


def test_the_simulation_says_about_how_long_the_real_pipeline_takes():
    ratios = [measure_pipeline("1f1b", 2, 6, repeats=3).ratio for _ in range(2)]
    assert 0.5 < min(ratios) < 2  # other processes may have the cores


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "pipedream"])
def test_the_makespans_are_within_15_percent_on_two_idle_cores(schedule):
    ratios = []
    while len(ratios) < 8 and not any(abs(ratio - 1) < 0.15 for ratio in ratios):
        ratios.append(measure_pipeline(schedule, 2, 8, chunks(schedule)).ratio)
    assert abs(ratios[-1] - 1) < 0.15, ratios


def test_what_cannot_be_run_is_refused_before_a_rank_starts():
    with pytest.raises(ValueError, match="unknown schedule 'magic'"):
        measure_pipeline("magic", 2, 4)
    with pytest.raises(ValueError, match="replicas of a stage is not measured"):
        measure_pipeline("pipedream", 3, 4, replicas=[2, 1])
