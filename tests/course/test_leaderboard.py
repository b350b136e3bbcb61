"""A leaderboard: its score is computed here, of valid orders; no order beats the bound."""

import csv
import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from minidist.course import report, report_page
from minidist.course.grade_all import Result
from minidist.course.grader import Grade, Verdict, questions
from minidist.course.lab import find
from minidist.course.labs.race.questions import TIMES, bound, read
from minidist.course.question import score
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


def test_the_score_is_the_mean_of_makespan_over_bound_if_all_are_valid():
    asked = questions(RACE, RACE.tasks[0], 0)
    answers = [question.right for question in asked]
    timed = [at for at, question in enumerate(asked) if question.score]
    over = [
        read(answers[at], asked[at].given)[1].makespan / bound(**asked[at].given) for at in timed
    ]
    assert score(asked, answers) == round(float(np.mean(over)), 4) > 1
    first = timed[0]
    name = "the program on rank 0"
    short = answers[first] | {name: answers[first][name][:-1]}
    for wrong in ("no answer", {}, short, answers[timed[-1]]):
        assert score(asked, [*answers[:first], wrong, *answers[first + 1 :]]) is None
    assert score([q for q in asked if not q.score], [{}] * (len(asked) - len(timed))) is None


def test_an_order_that_is_too_large_for_its_memory_has_no_score():
    asked = next(q for q in questions(RACE, RACE.tasks[0], 0) if q.score)
    assert asked.score(asked.right) >= 1
    with pytest.raises(ValueError, match=r"hold .* at their peaks, with memory for 1"):
        read(asked.right, asked.given | {"memory": 1})


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
    both = [Verdict(TINY.tasks[n], 3, [], score=value) for n, value in ((0, 1.25), (1, None))]
    assert Grade(TINY, both, 1, "").score is None, "a task has none"


def test_a_class_is_ranked_by_score_ties_share_a_place_and_others_have_none():
    scores = {"<ann>": 1.5, "bob": None, "cy": 1.25, "di": 1.5, "ed": 2.0}
    results = [
        Result(name, "tiny", 1, points={"9.1": 10}, score=value) for name, value in scores.items()
    ]
    places = [(place, r.name) for place, r in report_page.ranking(results)]
    assert places == [(1, "cy"), (2, "<ann>"), (2, "di"), (4, "ed")]
    head, *rows = csv.reader(report_page.as_csv(RANKED, results).splitlines())
    assert head[-2:] == ["score", "place"]
    ends = [["1.5000", "2"], ["", ""], ["1.2500", "1"], ["1.5000", "2"], ["2.0000", "4"]]
    assert [row[-2:] for row in rows] == ends
    assert "    1  1.2500  cy\n    2  1.5000  <ann>\n" in report_page.summary(RANKED, results)
    page = report_page.page(RANKED, results)
    assert "<h2>Leaderboard: time over bound</h2>" in page and "<td>&lt;ann&gt;" in page
    assert "<ann>" not in page
    plain = replace(RANKED, leaderboard="")
    assert "score" not in report_page.as_csv(plain, results).splitlines()[0]
    assert "Leaderboard" not in report_page.page(plain, results)
