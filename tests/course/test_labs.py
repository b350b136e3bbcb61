"""All labs: what they give to the reference, to the starter, to mistakes, to other right ways."""

import base64
import pickle
import re
import zlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from minidist.course import report
from minidist.course.diagnosis import answers_of, recognised
from minidist.course.grader import Grade, questions
from minidist.course.lab import labs, shares
from minidist.course.question import judge
from minidist.course.sandbox import Sandbox
from minidist.course.starter import handout
from minidist.errors import plural
from minidist.observe.pages import schedules
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import mistakes, mistakes_in
from tests.course.students import changed, graded, only, reference, starter

LABS = {lab.name: lab for lab in labs()}
NEEDS = {  # task: the tasks that its text says it builds on
    "5.3": ("5.1", "5.2"),
    "5.4": ("5.1", "5.2", "5.3"),
    "5.5": ("5.1", "5.2", "5.3", "5.4"),
    "5.6": ("5.1",),
    "5.7": ("5.1", "5.2", "5.3", "5.4", "5.5", "5.6"),
    "6.2": ("6.1",),
    "6.5": ("6.1", "6.2", "6.3", "6.4"),
    "10.2": ("10.1",),
    "10.4": ("10.1", "10.2"),
}
RIGHT_WAYS = mistakes_in(Path(__file__).with_name("right_ways.toml"))
TASKS = [(name, task.id) for name, lab in LABS.items() for task in lab.tasks]
every_lab = pytest.mark.parametrize("name", LABS)
QUICK = ("collectives",)  # -m slow takes all
each_lab_run = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LABS],
)


@every_lab
def test_a_lab_has_100_points_numbers_hints_and_lessons_that_exist(name):
    lab = LABS[name]
    assert lab.points == 100 and lab.number == list(LABS).index(name) + 1
    assert [task.id for task in lab.tasks] == list(lab.questions.QUESTIONS)
    for number, task in enumerate(lab.tasks, 1):
        assert task.id == f"{lab.number}.{number}" and task.blanks
        assert len(task.hints) == 3 and task.numbers and task.text
        assert 5 <= task.minutes <= 90 and task.difficulty in (1, 2, 3)
    assert 2 <= len(lab.written) <= 3
    for essay in lab.written:
        assert essay.question.endswith((".", "?"))
        assert all(points > 0 and words for points, words in essay.rubric)
    for lesson in lab.lessons:
        assert (PACKAGE.parent / "lessons" / f"{lesson}.py").is_file()


@every_lab
def test_points_minutes_and_handout_agree(name):
    lab, text = LABS[name], handout(LABS[name])
    minutes = sum(task.minutes for task in lab.tasks)
    assert f"{plural(len(lab.tasks), 'task')}, about {minutes} minutes, 100 points" in text
    for task in lab.tasks:
        assert abs(task.points - 100 * task.minutes / minutes) < 1
        effort = f"{task.minutes} minutes, difficulty {task.difficulty} of 3, {task.points} points"
        section = text[text.index(f"## Task {task.id}: {task.title}") :]
        assert effort in section.partition("\n## ")[0]
    assert all(essay.question in text for essay in lab.written)
    assert not any(words in text for essay in lab.written for _, words in essay.rubric)


def test_points_are_whole_and_none_is_lost():
    assert shares(100, [1, 1, 1]) == [34, 33, 33] and shares(5, [1, 1]) == [3, 2]
    assert shares(10, [10, 20, 45]) == [1, 3, 6] and shares(0, [1, 2]) == [0, 0]


@every_lab
def test_a_group_of_questions_has_a_name_if_there_are_others(name):
    for task in LABS[name].tasks:
        groups = [{q.group for q in questions(LABS[name], task, seed)} for seed in (0, 1)]
        assert groups[0] == groups[1] and (len(groups[0]) == 1 or "" not in groups[0]), task.id
        assert len(groups[0]) <= task.points


@every_lab
def test_a_question_says_one_rank_and_two_ranks(name):
    for task in LABS[name].tasks:
        for question in questions(LABS[name], task, seed=0):
            one = re.search(r"(?<![\d.-])1 [a-z-]+s\b", question.about)
            assert not one or one[0] == "1 pass", question.about


@every_lab
def test_other_seeds_draw_other_questions(name):
    for task in LABS[name].tasks:
        first, second = (
            pickle.dumps([q.given for q in questions(LABS[name], task, seed)]) for seed in (0, 1)
        )
        assert first != second, task.id


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if at else []) for at, name in enumerate(LABS)],
)
def test_zeros_nothing_and_the_answers_to_other_questions_are_wrong(name):
    lab = LABS[name]
    for task in lab.tasks:
        here, there = (questions(lab, task, seed) for seed in (0, 1))
        assert [judge(question, question.right) for question in here] == [None] * len(here)
        zeros = [{n: np.zeros_like(a) for n, a in question.right.items()} for question in here]
        for others in (zeros, [question.right for question in there], [{}] * len(here)):
            wrong = [judge(q, answer) for q, answer in zip(here, others, strict=False)]
            assert any(wrong), task.id


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
@each_lab_run
def test_the_reference_gets_all_points_for_any_seed(tmp_path, name, seed):
    found = graded(tmp_path, LABS[name], reference(LABS[name]), seed)
    assert not [line for verdict in found.verdicts for line in verdict.wrong]
    assert found.points == 100


@each_lab_run
def test_the_starter_gets_none_and_every_question_says_what_is_to_be_written(tmp_path, name):
    found = graded(tmp_path, LABS[name], starter(LABS[name]))
    assert found.points == 0 and len(found.verdicts) == len(LABS[name].tasks)
    assert not any(verdict.begun for verdict in found.verdicts)
    with Sandbox(LABS[name]) as sandbox:
        for task in LABS[name].tasks:
            answers = sandbox.ask(questions(LABS[name], task, 0)).answers
            assert all("NotImplementedError: Task " in answer for answer in answers)
            assert task.id in NEEDS or f"NotImplementedError: {task.stub}" in answers[0]


def test_a_deadlock_shows_the_students_line():
    lab = LABS["collectives"]
    here = "combine(channel.recv((r - 1) % N), mine, out=mine)"
    deaf = Edit("comm/collectives.py:ring", "combine(channel.recv(r), mine, out=mine)", here)
    (right,), files = reference(lab).values(), changed(lab, [deaf])
    lines = zip(right.splitlines(), files[deaf.path].splitlines(), strict=True)
    (number,) = (k for k, (before, after) in enumerate(lines, 1) if before != after)
    several = next(q for q in questions(lab, lab.tasks[2], 0) if len(q.given["arrays"]) > 1)
    with Sandbox(lab) as sandbox:
        sandbox.put(files)
        (said,) = sandbox.ask([several]).answers
    assert "rank 0: waits in recv for rank 0 since" in said
    assert said.endswith(f"at collectives.py:{number}")


@pytest.mark.slow
@pytest.mark.parametrize("name, id", TASKS)
def test_whoever_has_done_one_task_and_what_it_builds_on_gets_their_points(tmp_path, name, id):
    done = (id, *NEEDS.get(id, ()))
    found = graded(tmp_path, LABS[name], starter(LABS[name], done))
    passed = {verdict.task.id for verdict in found.verdicts if verdict.passed}
    assert passed == set(done), [v.wrong[:1] for v in found.verdicts if v.task.id in done]
    (task,) = (task for task in LABS[name].tasks if task.id == id)
    named = {word.strip(".,;:()") for word in task.text.split()}
    assert named >= set(done[1:]), f"the text of {id} does not say that it builds on {done[1:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    ["return None", "return [*locals().values()][-1]", "return []"],
    ids=["nothing", "echo", "empty"],
)
@every_lab
def test_one_and_the_same_body_for_everything_earns_nothing(tmp_path, name, body):
    files = {
        path: re.sub(r"raise NotImplementedError\(\"Task .*\"\)", body, source)
        for path, source in starter(LABS[name]).items()
    }
    assert not any('NotImplementedError("Task' in source for source in files.values())
    found = graded(tmp_path, LABS[name], files)
    assert {verdict.task.id: verdict.groups for verdict in found.verdicts if verdict.points} == {}


@pytest.mark.parametrize(
    "name, id",
    [
        pytest.param(name, id, id=id, marks=[] if id in ("1.1", "4.1") else [pytest.mark.slow])
        for name, id in TASKS
    ],
)
def test_every_mistake_of_a_task_is_caught_and_gives_answers_of_its_own(name, id):
    lab = LABS[name]
    (task,) = (task for task in lab.tasks if task.id == id)
    asked = questions(lab, task, 0)
    mine = [mistake for mistake in mistakes().values() if mistake.task == id]
    with Sandbox(lab) as sandbox:
        answers = {mistake.name: answers_of(mistake, sandbox, asked) for mistake in mine}
    for mistake, given in answers.items():
        messages = list(map(judge, asked, given))
        assert any(messages), f"{mistake} has its points"
        alike = [
            other
            for other, theirs in answers.items()
            if all(map(recognised, asked, given, messages, theirs))
        ]
        assert alike == [mistake], messages


@pytest.mark.parametrize(
    "name, mistake",
    [
        ("pipelines", "gpipe_one_by_one"),
        pytest.param("autograd", "softmax_of_the_whole_maximum", marks=pytest.mark.slow),  # NaN
        pytest.param("data_parallel", "empty_shards_do_not_join", marks=pytest.mark.slow),  # error
        pytest.param("hybrid", "copies_on_tp_count_in_the_norm", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_earns_nothing_and_is_named(tmp_path, name, mistake):
    mistake = mistakes()[mistake]
    lab = only(LABS[name], mistake.task)
    (verdict,) = graded(tmp_path, lab, changed(lab, mistake.edits)).verdicts
    assert verdict.wrong and verdict.points < verdict.task.points
    assert verdict.mistakes == (mistake.says,), verdict.wrong


def test_a_missed_number_of_a_schedule_draws_the_students_timeline(tmp_path):
    mistake = mistakes()["all_forwards_first"]
    lab = only(LABS["pipelines"], mistake.task)
    (verdict,) = graded(tmp_path, lab, changed(lab, mistake.edits)).verdicts
    drawn = [wrong for wrong in verdict.wrong if "schedules.html#" in wrong][-1]
    lines = [line.strip() for line in drawn.splitlines()]
    (link,) = (line for line in lines if line.startswith("schedules.html#"))
    fields = {name: value for name, (value,) in parse_qs(link.partition("#")[2]).items()}
    p, m = int(fields["p"]), int(fields["m"])
    rows = [line.split()[1] for line in lines if re.match(r"rank \d", line)]
    assert p > 1 and rows[:p] == list(map(str, range(p)))
    assert lines[-2].startswith("yours: a rank idles ") and "micro-batches" in lines[-2]
    assert lines[-1].endswith(f"they hold {', '.join(str(min(m, p - r)) for r in range(p))}")
    packed = fields["text.z"] + "=" * (-len(fields["text.z"]) % 4)
    text = zlib.decompress(base64.urlsafe_b64decode(packed), -zlib.MAX_WBITS).decode()
    assert schedules.answer(text=text, p=p, m=m)["fault"] is None
    short = report.text(Grade(lab, [replace(verdict, wrong=[drawn])], 0, ""))
    assert link in short, "it is not folded"


def test_another_wrong_answer_is_no_known_mistake(tmp_path):
    lab = only(LABS["collectives"], "2.3")
    doubled = Edit(
        "comm/collectives.py:ring",
        "combine(2 * channel.recv((r - 1) % N), mine, out=mine)",
        "combine(channel.recv((r - 1) % N), mine, out=mine)",
    )
    (verdict,) = graded(tmp_path, lab, changed(lab, [doubled])).verdicts
    assert verdict.wrong and verdict.mistakes == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LABS if name != "autograd"])
def test_other_right_ways_earn_the_points(tmp_path, name):
    lab = LABS[name]
    ways = [way for way in RIGHT_WAYS.values() if way.task.startswith(f"{lab.number}.")]
    files = changed(lab, [edit for way in ways for edit in way.edits])
    found = graded(tmp_path, lab, files, seed=8)
    assert ways and not [line for verdict in found.verdicts for line in verdict.wrong]


def test_the_next_best_plans_are_no_plan_in_other_words():
    lab = LABS["planning"]
    asked = [q for q in questions(lab, lab.task("10.4"), 0) if q.given["wanted"] > 1]
    for question in asked:
        right = question.right
        assert judge(question, right) is None
        number = len(right["seconds"])
        first = {n: np.repeat(a[:1], number) if a.ndim else a for n, a in right.items()}
        assert "there are 1 plan, not" in judge(question, first)
        again = (
            {"sequence": np.arange(number)},
            {"cut": np.array(["layers", "blocks"] * 3)[:number]},
        )
        for other in again:
            assert judge(question, first | other), other
        alone = question.given["machine"]["ranks"] == 1
        assert not alone or "no search tries" in judge(question, first | again[0])
