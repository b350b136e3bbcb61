"""Pipelines that really run, beside what a simulator makes of their durations."""

import pytest

from minidist.observe import timeline
from minidist.observe.chrome_trace import tracks
from minidist.observe.measure_pipeline import measure_pipeline, measured_times
from minidist.pipeline_parallel import programs
from tests.strategies import chunks_of


def signs(made):
    return {a.sign for program in made for a in program}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "pipedream"])
def test_every_schedule_is_measured_simulated_and_drawn(schedule):
    real = measure_pipeline(schedule, 2, 4, chunks_of(schedule), width=32, rows=2, repeats=3)
    assert len(real.makespans) == 3 and min(real.makespans) > 0
    made = programs(schedule, 2, 4, chunks_of(schedule))
    assert {sign for sign, each in real.durations.items() if any(each)} == signs(made)
    assert {len(each) for each in real.durations.values()} == {2 * chunks_of(schedule)}
    assert 0 < real.overhead and 0 < real.latency
    for program, own, busy in zip(made, made.placement, real.simulation.busy, strict=True):
        took = sum(real.durations[a.sign][own[a.chunk]] for a in program)
        assert busy == pytest.approx(took), "every action takes as long as its kind was measured"
    assert list(tracks(real.log)) == [(0, "main"), (1, "main")]
    done = [name for e in real.log.events if e.category == "compute" for name in e.name.split()]
    assert sorted(done) == sorted(e.name for e in real.simulation.timeline.events)
    for log in (real.log, real.simulation.timeline):
        picture = timeline.text(log)
        assert log.unit == "s" and "F forward" in picture and "scaled: 1 column is" in picture
        assert ("lower case: chunk 1" in " ".join(picture.split())) == (chunks_of(schedule) == 2)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_on_a_gpu_a_schedule_is_measured_by_its_clock(schedule):
    real = measure_pipeline(schedule, 2, 3, width=8, rows=2, repeats=1, device="gpu")
    assert min(real.makespans) > 0 and list(tracks(real.log)) == [(0, "main"), (1, "main")]
    made = programs(schedule, 2, 3)
    assert {sign for sign, each in real.durations.items() if any(each)} == signs(made)


def test_a_searched_schedule_gets_the_times_of_a_first_run():
    shape = {"width": 32, "rows": 2, "repeats": 1}
    times = measured_times("zb_auto", 2, 4, **shape)
    assert list(times) == ["forward", "backward_input", "backward_weight", "latency"]
    assert all(len(each) == 2 and min(each) > 0 for each in list(times.values())[:3])
    real = measure_pipeline("zb_auto", 2, 4, **shape, **times, memory=2)
    assert max(real.simulation.peak_stash) <= 2
    assert measured_times("zb_h1", 2, 4, **shape) == {}


def test_copies_of_a_pipeline_are_measured_with_their_sums():
    real = measure_pipeline("looped_bfs", 1, 2, 2, width=32, rows=2, repeats=3, copies=2)
    assert list(tracks(real.log)) == [(0, "main"), (0, "sums")]
    assert all(seconds > 0 for seconds in real.durations["R"]) and len(real.durations["R"]) == 2
    assert list(tracks(real.simulation.timeline)) == [(0, "main"), (0, "sums")]
    for log in (real.log, real.simulation.timeline):
        assert sorted(e.name for e in log.events if e.name[0] == "R") == ["R", "R.1"]
        assert "R sum over ranks" in timeline.text(log)
    with pytest.raises(ValueError, match="these programs update the weights themselves"):
        measure_pipeline("pipedream", 1, 2, copies=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "pipedream"])
def test_the_makespans_are_within_15_percent_on_two_idle_cores(schedule):
    ratios = []
    while len(ratios) < 8 and not any(abs(ratio - 1) < 0.15 for ratio in ratios):
        ratios.append(measure_pipeline(schedule, 2, 8, chunks_of(schedule)).ratio)
    assert abs(ratios[-1] - 1) < 0.15, ratios


def test_what_cannot_be_run_is_refused_before_a_rank_starts():
    with pytest.raises(ValueError, match="unknown schedule 'magic'"):
        measure_pipeline("magic", 2, 4)
    with pytest.raises(ValueError, match="replicas of a stage is not measured"):
        measure_pipeline("pipedream", 3, 4, replicas=[2, 1])
