"""A long batch that is not simulated whole, against one that is."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning.plans.estimate import WHOLE, TimedPipeline, simulated

ORDERS = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("interleaved", 2)]
ORDERS += [("looped_bfs", 2), ("interleaved_zb", 2), ("zb_v", 2), ("v_half", 2), ("dualpipe_v", 2)]


@st.composite
def pipelines(draw):
    """Draw stages as a plan has them: equal, but for one more block each and a head at the end."""
    schedule, v = draw(st.sampled_from(ORDERS))
    p, whole = draw(st.integers(1, 3)), st.integers(1, 6)
    block = [Fraction(draw(whole)) for _ in range(3)]
    blocks = draw(st.integers(1, 3))
    longer = draw(st.integers(0, p * v - 1))
    head = Fraction(draw(st.integers(0, 6)), 2)
    stages = [blocks + (k >= p * v - longer) for k in range(p * v)]
    times = [tuple(n * t + head * (k == p * v - 1) for k, n in enumerate(stages)) for t in block]
    reduce = tuple(Fraction(n) for n in stages)
    return TimedPipeline(schedule, p, v, *times, Fraction(draw(st.integers(0, 2)), 2), reduce)


@settings(max_examples=40)
@given(pipelines(), st.integers(1, 3), st.integers(0, 2))
def test_a_long_batch_takes_what_its_simulation_says(pipeline, more, rest):
    p = pipeline.p
    m = (WHOLE + more) * p
    m += rest % p if pipeline.schedule not in ("interleaved", "interleaved_zb") else 0
    assert pipeline.makespan(m) == simulated(pipeline, m)


def test_a_long_batch_is_not_simulated_whole():
    pipeline = TimedPipeline("1f1b", 4, 1, (1,) * 4, (1,) * 4, (1,) * 4)
    simulated.cache_clear()
    assert pipeline.makespan(100_000) == 3 * (100_000 + 3)
    assert simulated.cache_info().currsize == 3


@pytest.mark.parametrize("m", [1, 7])
def test_a_short_batch_is_simulated(m):
    pipeline = TimedPipeline("gpipe", 2, 1, (2, 3), (1, 1), (1, 1))
    assert pipeline.makespan(m) == simulated(pipeline, m)
