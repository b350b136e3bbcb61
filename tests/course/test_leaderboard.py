"""A leaderboard: its score is computed here, of valid orders; no order beats the bound."""

from random import Random

import pytest

from minidist.course.lab import find
from minidist.course.labs.race.test_race import TIMES, bound
from tests.course.students import graded, reference
from tests.pipeline_parallel.optimal_order import least_makespan

FORGED = """
honest = zb_auto

def zb_auto(**given):
    from minidist.planning.simulator import Simulation

    Simulation.makespan = property(lambda self: 1, lambda self, value: None)
    return honest(**given)
"""
pytestmark = pytest.mark.slow


def test_no_order_beats_the_bound_and_some_reach_it():
    random, gaps = Random(1), []
    for _ in range(60):
        p = random.randint(1, 3)
        times = {name: [random.randint(1, 9) for _ in range(p)] for name in TIMES}
        m, memory, latency = random.randint(1, 4), random.randint(1, 4), random.randint(0, 3)
        stages = list(zip(*times.values(), strict=True))
        alone = m * (sum(map(sum, stages)) + 2 * (p - 1) * latency)
        least = least_makespan(m, stages, latency, memory, alone)
        gaps.append(least / bound(p=p, m=m, latency=latency, memory=memory, **times))
    assert min(gaps) == 1 and sum(gap == 1 for gap in gaps) > 30


def test_a_clock_that_a_student_has_set_back_changes_no_score(tmp_path):
    lab, path = find("race"), "pipeline_parallel/zb_auto.py"
    honest = reference(lab)
    scores = [
        graded(tmp_path / name, lab, honest | {path: source}).score
        for name, source in (("honest", honest[path]), ("forged", honest[path] + FORGED))
    ]
    assert scores[0] == scores[1] > 1
