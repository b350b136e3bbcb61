"""All labs: what they give to the reference, to the starter, to mistakes, to other right ways."""

import base64
import re
import zlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from minidist.course import report
from minidist.course.diagnosis import same_case
from minidist.course.grader import Grade
from minidist.course.lab import labs
from minidist.course.starter import handout
from minidist.observe.pages import schedules
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import mistakes, mistakes_in
from tests.course.in_process import cases
from tests.course.students import PATIENT, changed, graded, only, reference, starter

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
OF_TASKS = [(lab.name, task.id) for lab in LABS.values() for task in lab.tasks]
each_lab = pytest.mark.parametrize("name", LABS)
each_task = pytest.mark.parametrize("name, id", OF_TASKS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "collectives" else [pytest.mark.slow])
        for name in LABS
    ],
)
def test_the_reference_gets_all_points_and_the_starter_none(tmp_path, name):
    found = graded(tmp_path / "reference", LABS[name], reference(LABS[name]), seed=7)
    assert found.points == 100, [verdict.wrong for verdict in found.verdicts]
    found = graded(tmp_path / "starter", LABS[name], starter(LABS[name]))
    assert found.points == 0 and not any(verdict.begun for verdict in found.verdicts)


@pytest.mark.slow
@each_lab
def test_a_lab_has_100_points_in_proportion_to_minutes_and_a_handout_with_three_hints(name):
    lab, text = LABS[name], handout(LABS[name])
    minutes = sum(task.minutes for task in lab.tasks)
    assert lab.points == 100 and lab.number == list(LABS).index(name) + 1
    assert f"about {minutes} minutes, 100 points" in text
    for number, task in enumerate(lab.tasks, 1):
        assert task.id == f"{lab.number}.{number}" and task.blanks
        assert len(task.hints) == 3 and task.numbers and task.text
        assert abs(task.points - 100 * task.minutes / minutes) < 1
        section = text[text.index(f"## Task {task.id}: {task.title}") :].partition("\n## ")[0]
        assert f"difficulty {task.difficulty} of 3, {task.points} points" in section
        assert all(hint.strip() in section for hint in task.hints)
    for essay in lab.written:
        assert essay.question in text and essay.rubric
        assert not any(words in text for _, words in essay.rubric)
    for lesson in lab.lessons:
        assert (PACKAGE.parent / "lessons" / f"{lesson}.py").is_file()


@pytest.mark.slow
@pytest.mark.grid(16)
@each_task
def test_every_mistake_of_a_task_fails_a_test_with_answers_of_its_own(name, id):
    mine = [mistake for mistake in mistakes().values() if mistake.task == id]
    runs = {mistake.name: cases(LABS[name], id, mistake) for mistake in mine}
    for mistake, own in runs.items():
        assert any(case.wrong for case in own), f"{mistake} has its points"
        alike = [name for name, theirs in runs.items() if all(map(same_case, own, theirs))]
        assert alike == [mistake], [case.wrong for case in own]


@pytest.mark.slow
@pytest.mark.grid(16)
@pytest.mark.parametrize("way", RIGHT_WAYS)
def test_other_right_ways_pass_with_another_seed(way):
    lab = next(lab for lab in LABS.values() if RIGHT_WAYS[way].task in [t.id for t in lab.tasks])
    run = cases(lab, RIGHT_WAYS[way].task, RIGHT_WAYS[way], seed=2)
    assert not any(case.wrong for case in run), [case.wrong for case in run]


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("body", ["return None", "return [*locals().values()][-1]"], ids=str)
@each_lab
def test_one_and_the_same_body_for_everything_earns_nothing(tmp_path, name, body):
    files = {
        path: re.sub(r"raise NotImplementedError\(\"Task .*\"\)", body, source)
        for path, source in starter(LABS[name]).items()
    }
    found = graded(tmp_path, LABS[name], files)
    assert {verdict.task.id: verdict.groups for verdict in found.verdicts if verdict.points} == {}


@pytest.mark.slow
@pytest.mark.grid(1)
@each_task
def test_whoever_has_done_one_task_and_what_it_builds_on_gets_their_points(tmp_path, name, id):
    done = (id, *NEEDS.get(id, ()))
    found = graded(tmp_path, LABS[name], starter(LABS[name], done))
    passed = {verdict.task.id for verdict in found.verdicts if verdict.passed}
    assert passed == set(done), [v.wrong[:1] for v in found.verdicts if v.task.id in done]
    named = {word.strip(".,;:()") for word in LABS[name].task(id).text.split()}
    assert named >= set(done[1:]), f"the text of {id} does not say that it builds on {done[1:]}"


@pytest.mark.slow
@pytest.mark.grid(1)
@each_task
def test_a_mistake_is_named(tmp_path, name, id):
    lab = only(LABS[name], id)
    *_, made = (mistake for mistake in mistakes().values() if mistake.task == id)
    (verdict,) = graded(tmp_path, lab, changed(lab, made.edits), limits=PATIENT).verdicts
    assert verdict.points < verdict.task.points and verdict.mistakes == (made.says,)


@pytest.mark.slow
def test_a_wrong_answer_that_no_mistake_gives_has_no_name_and_a_deadlock_the_students_line(
    tmp_path,
):
    lab = only(LABS["collectives"], "2.3")
    here = "combine(channel.recv((r - 1) % N), mine, out=mine)"
    doubled, deaf = (
        changed(lab, [Edit("comm/collectives.py:ring", f"combine({taken}, mine, out=mine)", here)])
        for taken in ("2 * channel.recv((r - 1) % N)", "channel.recv(r)")
    )
    (verdict,) = graded(tmp_path, lab, doubled).verdicts
    assert verdict.wrong and verdict.mistakes == ()
    (verdict,) = graded(tmp_path, lab, deaf).verdicts
    assert verdict.wrong and verdict.mistakes == ()
    assert "rank 0: waits in recv for rank 0 since" in verdict.wrong[-1]
    (source,) = deaf.values()
    (line,) = (n for n, x in enumerate(source.splitlines(), 1) if "combine(channel.recv(r)," in x)
    assert verdict.wrong[-1].endswith(f"at collectives.py:{line}")


@pytest.mark.slow
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
