"""All labs: what they give to the reference, to the starter, to mistakes, to other right ways."""

import importlib
import pickle
import re

import numpy as np
import pytest

from minidist.course.grader import judge, questions
from minidist.course.lab import labs
from minidist.course.overlay import PACKAGE
from minidist.course.sandbox import Sandbox
from tests.course.mistakes import data_parallel, hybrid, pipelines, rows, splits
from tests.course.students import changed, graded, only, reference, starter

LABS = {lab.name: lab for lab in labs()}
TABLES = {
    "data_parallel": data_parallel,
    "pipelines": pipelines,
    "splits": splits,
    "hybrid": hybrid,
}
TASKS = [(name, task.id) for name, lab in LABS.items() for task in lab.tasks]
every_lab = pytest.mark.parametrize("name", LABS)


def asked(question, probes):
    """Return what the package itself answers, asked right here."""
    answer = getattr(probes, question.probe)(**question.given)
    return {name: np.asarray(value) for name, value in answer.items()}


def first_alone(cases):
    """Return a test's parameters, those after the first marked as slow."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if at else [], id=f"{case[0]}-{at}")
        for at, case in enumerate(cases)
    ]


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
@every_lab
def test_the_reference_gets_all_points_for_any_seed(tmp_path, name, seed):
    found = graded(tmp_path, LABS[name], reference(LABS[name]), seed)
    assert not [line for verdict in found.verdicts for line in verdict.wrong]
    assert found.points == 100


@every_lab
def test_the_starter_gets_none_and_every_question_says_what_is_to_be_written(tmp_path, name):
    found = graded(tmp_path, LABS[name], starter(LABS[name]))
    assert found.points == 0 and len(found.verdicts) == len(LABS[name].tasks)
    for verdict in found.verdicts:
        said = f"NotImplementedError: Task {verdict.task.id}: {verdict.task.title}"
        assert len(verdict.wrong) == verdict.questions > 0
        assert said in verdict.wrong[0], verdict.wrong[0]
        assert all("NotImplementedError: Task " in line for line in verdict.wrong)


def test_a_deadlock_shows_the_students_line():
    lab, here = LABS["collectives"], "combine(channel.recv((r - 1) % N)"
    ((path, source),) = reference(lab).items()
    line = source[: source.index(here)].count("\n") + 1
    several = next(q for q in questions(lab, lab.tasks[2], 0) if len(q.given["arrays"]) > 1)
    with Sandbox(lab) as sandbox:
        sandbox.put({path: source.replace(here, "combine(channel.recv(r)")})
        (said,) = sandbox.ask([several]).answers
    assert "rank 0: waits in recv for rank 0 since" in said
    assert said.endswith(f"at collectives.py:{line}")


@pytest.mark.slow
@pytest.mark.parametrize("name, id", TASKS)
def test_whoever_has_done_one_task_and_what_it_builds_on_gets_their_points(tmp_path, name, id):
    needs = getattr(TABLES.get(name), "NEEDS", {})
    done = (id, *needs.get(id, ()))
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
    "name, id, path, right, wrong, said",
    [
        case
        for name, table in TABLES.items()
        for case in first_alone([(name, *mistake) for mistake in table.MISTAKES])
    ],
)
def test_a_mistake_earns_nothing_and_is_named(tmp_path, name, id, path, right, wrong, said):
    lab = LABS[name]
    found = graded(tmp_path, only(lab, id), changed(lab, path, right, wrong))
    (verdict,) = found.verdicts
    assert not verdict.passed and verdict.points == 0
    assert any(said in line for line in verdict.wrong), "\n".join(verdict.wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, id, path, right, other",
    [(name, *other) for name, table in TABLES.items() for other in table.OTHERS],
)
def test_another_right_way_earns_the_points(tmp_path, name, id, path, right, other):
    lab = LABS[name]
    found = graded(tmp_path, only(lab, id), changed(lab, path, right, other))
    assert not found.verdicts[0].wrong


@pytest.mark.parametrize(
    "name, row",
    [
        case
        for name, table in rows.CANARIES.items()
        for case in first_alone([(name, row) for row in table])
    ],
)
def test_a_mistake_in_every_task_earns_nothing_and_each_is_named(tmp_path, name, row):
    lab = LABS[name]
    files = reference(lab)
    for task, (path, right, wrong, _) in row.items():
        assert files[path].count(right) >= 1, f"{task}: {path} has not {right!r}"
        files[path] = files[path].replace(right, wrong)
    if rows.TENSOR in files:
        files[rows.TENSOR] += rows.ALONG_EVERY_PATH
    assert list(row) == [task.id for task in lab.tasks]
    for verdict in graded(tmp_path, lab, files).verdicts:
        (_, _, _, said), wrong = row[verdict.task.id], "\n".join(verdict.wrong)
        assert verdict.points == 0, f"{verdict.task.id} has its points in spite of a mistake"
        assert re.search(said, wrong), f"{verdict.task.id}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("name", rows.OTHER_WAYS)
def test_other_right_ways_earn_the_points(tmp_path, name):
    files = reference(LABS[name])
    for path, here, there in rows.OTHER_WAYS[name]:
        assert here in files[path]
        files[path] = files[path].replace(here, there)
    found = graded(tmp_path, LABS[name], files, seed=8)
    assert not [line for verdict in found.verdicts for line in verdict.wrong]
