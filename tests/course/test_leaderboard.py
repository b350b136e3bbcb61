"""A leaderboard: its score is computed here, of valid orders; no order beats the bound."""

import csv
import json
from dataclasses import replace
from random import Random

import pytest

from minidist.course import class_report, report
from minidist.course.grade_all import Result
from minidist.course.grader import Grade, Verdict
from minidist.course.lab import find
from minidist.course.labs.race.test_race import TIMES, bound
from tests.course.students import graded, reference
from tests.course.tiny import TINY
from tests.pipeline_parallel.optimal_order import least_makespan

RACE = find("race")
FORGED = """
honest = zb_auto

def zb_auto(**given):
    from minidist.planning.simulator import Simulation

    Simulation.makespan = property(lambda self: 1, lambda self, value: None)
    return honest(**given)
"""
RANKED = replace(TINY, tasks=TINY.tasks[:1], leaderboard="time over bound")


def problem_of(random):
    p = random.randint(1, 3)
    times = {name: [random.randint(1, 9) for _ in range(p)] for name in TIMES}
    m, memory = random.randint(1, 4), random.randint(1, 4)
    return {"p": p, "m": m, **times, "latency": random.randint(0, 3), "memory": memory}


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_no_order_beats_the_bound_and_some_reach_it(count):
    random, gaps = Random(1), []
    for _ in range(count):
        problem = problem_of(random)
        p, m, latency, memory = (problem[name] for name in ("p", "m", "latency", "memory"))
        stages = list(zip(*(problem[name] for name in TIMES), strict=True))
        alone = m * (sum(map(sum, stages)) + 2 * (p - 1) * latency)
        gaps.append(least_makespan(m, stages, latency, memory, alone) / bound(**problem))
    assert min(gaps) == 1 and sum(gap == 1 for gap in gaps) > count / 2


@pytest.mark.slow
def test_a_clock_that_a_student_has_set_back_changes_no_score(tmp_path):
    honest, path = reference(RACE), "pipeline_parallel/zb_auto.py"
    forged = honest[path] + FORGED
    scores = [
        graded(tmp_path / name, RACE, honest | {path: source}).score
        for name, source in (("honest", honest[path]), ("forged", forged))
    ]
    assert scores[0] == scores[1] > 1


def grade_of(value, lab=RANKED):
    return Grade(lab, [Verdict(lab.tasks[0], 3, [], score=value)], 1, "")


def test_reports_have_the_score_of_a_lab_with_a_leaderboard():
    rows = json.loads(report.gradescope(grade_of(1.25)))["leaderboard"]
    assert rows == [{"name": "time over bound", "value": 1.25, "order": "asc"}]
    words = "for the leaderboard, time over bound (lower is better): "
    assert f"{words}1.2500\n" in report.text(grade_of(1.25))
    assert f"{words}none: an answer is not valid\n" in report.text(grade_of(None))
    without = [grade_of(None), grade_of(1.25, replace(RANKED, leaderboard=""))]
    assert all("leaderboard" not in json.loads(report.gradescope(each)) for each in without)
    assert "leaderboard" not in report.text(without[1])


def test_a_class_is_ranked_by_score_ties_share_a_place_and_others_have_none():
    scores = {"ann": 1.5, "bob": None, "cy": 1.25, "di": 1.5, "ed": 2.0}
    results = [Result(name, "tiny", 1, points={"9.1": 10}, score=x) for name, x in scores.items()]
    places = [(place, r.name) for place, r in class_report.ranking(results)]
    assert places == [(1, "cy"), (2, "ann"), (2, "di"), (4, "ed")]
    head, *rows = csv.reader(class_report.as_csv(RANKED, results, {}, {}).splitlines())
    assert head[-2:] == ["score", "place"]
    ends = [["1.5000", "2"], ["", ""], ["1.2500", "1"], ["1.5000", "2"], ["2.0000", "4"]]
    assert [row[-2:] for row in rows] == ends
    said = class_report.summary(RANKED, results, {})
    assert "Leaderboard: time over bound\n    1  1.2500  cy\n    2  1.5000  ann\n" in said
    assert "Leaderboard" not in class_report.summary(replace(RANKED, leaderboard=""), results, {})
