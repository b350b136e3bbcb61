"""All labs: what they give to the reference, to the starter, to mistakes, to other right ways."""

import importlib
import pickle
import re
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from minidist.course.edits import Edit
from minidist.course.grader import judge, questions
from minidist.course.lab import labs
from minidist.course.overlay import PACKAGE
from minidist.course.register import mistakes, read
from minidist.course.sandbox import Sandbox
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
}
RIGHT_WAYS = read(Path(__file__).with_name("right_ways.toml"))
TASKS = [(name, task.id) for name, lab in LABS.items() for task in lab.tasks]
every_lab = pytest.mark.parametrize("name", LABS)
QUICK = ("collectives", "pipelines")  # one lab of arrays, one of values; -m slow takes all
each_lab_run = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LABS],
)


def asked(question, probes):
    """Return what the package itself answers, asked right here."""
    answer = getattr(probes, question.probe)(**question.given)
    return {name: np.asarray(value) for name, value in answer.items()}


def together(lab):
    """Return lists of mistakes that are made at once: one per task, where tasks stand alone."""
    tasks = [[m for m in mistakes().values() if m.task == task.id] for task in lab.tasks]
    if any(task.id in NEEDS for task in lab.tasks):
        return [[mistake] for mine in tasks for mistake in mine]
    return [list(filter(None, row)) for row in zip_longest(*tasks)]


@every_lab
def test_a_lab_has_100_points_numbers_hints_and_names_that_exist(name):
    lab, words = LABS[name], set()
    for path in PACKAGE.rglob("*.py"):
        if "course" not in path.parts:
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    assert lab.points == 100 and lab.number == list(LABS).index(name) + 1
    assert [task.id for task in lab.tasks] == list(lab.questions.QUESTIONS)
    for number, task in enumerate(lab.tasks, 1):
        assert task.id == f"{lab.number}.{number}"
        assert 2 <= len(task.hints) <= 3 and task.numbers and task.text.strip()
        for quoted in re.findall(r"`([^`]+)`", "\n".join([task.text, *task.numbers, *task.hints])):
            called = re.match(r"[A-Za-z_][\w.]*", quoted)
            for word in called[0].split(".") if called else []:
                assert word in words, f"{task.id}: {quoted}"


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
    lab, probes = LABS[name], importlib.import_module(f"minidist.course.probes.{name}")
    for task in lab.tasks:
        here, there = (
            [(q, asked(q, probes)) for q in questions(lab, task, seed)] for seed in (0, 1)
        )
        assert [judge(question, answer) for question, answer in here] == [None] * len(here)
        zeros = [{n: np.zeros_like(a) for n, a in answer.items()} for _, answer in here]
        for others in (zeros, [answer for _, answer in there], [{}] * len(here)):
            wrong = [judge(q, answer) for (q, _), answer in zip(here, others, strict=False)]
            assert any(wrong), task.id


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
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
    for verdict in found.verdicts:
        said = f"NotImplementedError: Task {verdict.task.id}: {verdict.task.title}"
        assert len(verdict.wrong) == verdict.questions > 0
        assert said in verdict.wrong[0], verdict.wrong[0]
        assert all("NotImplementedError: Task " in line for line in verdict.wrong)


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
    assert [verdict.task.id for verdict in found.verdicts if verdict.passed] == []


@pytest.mark.parametrize(
    "name, made",
    [
        pytest.param(
            name,
            made,
            id=made[0].name,
            marks=[pytest.mark.slow] if at or name not in QUICK else [],
        )
        for name, lab in LABS.items()
        for at, made in enumerate(together(lab))
    ],
)
def test_a_mistake_earns_nothing_and_is_named(tmp_path, name, made):
    by_task = {mistake.task: mistake for mistake in made}
    files = changed(LABS[name], [edit for mistake in made for edit in mistake.edits])
    found = graded(tmp_path, only(LABS[name], *by_task), files)
    assert len(found.verdicts) == len(made)
    for verdict in found.verdicts:
        mistake, wrong = by_task[verdict.task.id], "\n".join(verdict.wrong)
        assert not verdict.passed and verdict.points == 0, f"{mistake.name} has its points"
        assert re.search(mistake.says, wrong), f"{mistake.name}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LABS if name != "autograd"])
def test_other_right_ways_earn_the_points(tmp_path, name):
    lab = LABS[name]
    ways = [way for way in RIGHT_WAYS.values() if way.task.startswith(f"{lab.number}.")]
    files = changed(lab, [edit for way in ways for edit in way.edits])
    found = graded(tmp_path, lab, files, seed=8)
    assert ways and not [line for verdict in found.verdicts for line in verdict.wrong]
