"""Variants: each student has one of several versions of a task, and no other one is right."""

import json
from collections import Counter

import pytest

from minidist.cli import main
from minidist.course import starter
from minidist.course.diagnosis import mistakes_of
from minidist.course.lab import find, labs
from minidist.verify.mistakes.register import mistakes
from tests.course.in_process import cases
from tests.course.students import PATIENT, changed, graded, hand_in, only, reference

LABS = {task.id: lab for lab in labs() for task in lab.tasks if task.variants}
NAMES = [f"s{n}@x.org" for n in range(1000)]
pytestmark = pytest.mark.slow
each_task = pytest.mark.parametrize("id", LABS)


def students_of(id):
    """Return (the lab of a student, what it asks) for each variant of a task."""
    found = {}
    for name in NAMES[:40]:
        lab = LABS[id].for_student(name)
        found.setdefault(lab.task(id).variant.name, lab)
    return [(found[variant.name], variant) for variant in LABS[id].task(id).variants]


@each_task
def test_two_right_answers_differ_and_a_starter_asks_for_one_alone(id):
    (path, *_), lab = dict(LABS[id].task(id).targets), LABS[id]
    assert lab.for_student(" ") == lab and not lab.variants
    for lab, mine in students_of(id):
        text = starter.handout(lab)
        section = text[text.index(f"## Task {id}") :].partition("\n## ")[0]
        assert f"The version of {lab.student}.** {mine.asks}" in section
        assert f"yours: {mine.says}" in starter.map_of(lab, path).replace("\n#       ", "")
        assert (mine.hint or LABS[id].task(id).hints[-1]) in section
        others = [v for v in lab.task(id).variants if v != mine]
        assert not any(v.asks in text for v in others)
        assert not any(v.hint in text for v in others if v.hint not in ("", mine.hint))
        rest = [own for own in lab.variants if own.task != id]
        for variant in lab.task(id).variants:
            wrong = [case.wrong for case in cases(lab, id, *rest, variant) if case.wrong]
            assert bool(wrong) == (variant != mine), (mine.name, variant.name, wrong)


@pytest.mark.grid(2)
@each_task
def test_the_own_answer_earns_all_points_and_a_copied_one_names_both_versions(tmp_path, id):
    (lab, mine), (_, other), *_ = students_of(id)
    rest = [edit for own in lab.variants if own.task != id for edit in own.edits]
    right = graded(tmp_path / "own", lab, changed(lab, [*rest, *mine.edits]), seed=3)
    assert right.points == 100, [verdict.wrong for verdict in right.verdicts]
    for folder, files, whose in [
        ("copied", changed(lab, other.edits), f"another student's version: {other.says}"),
        ("package", reference(lab), "the package's own version"),
    ]:
        (verdict,) = graded(tmp_path / folder, only(lab, id), files, seed=3).verdicts
        assert verdict.points < verdict.task.points
        assert verdict.mistakes == (f"it is {whose}; yours: {mine.says}",), verdict.wrong


def test_a_mistake_in_a_students_own_version_is_named(tmp_path):
    (lab, mine), made = students_of("3.3")[1], mistakes()["bucket_per_parameter"]
    assert mine.edits and len(list(mistakes_of(lab, lab.task("3.3")))) > 1
    files = changed(lab, [*mine.edits, *made.edits])
    (verdict,) = graded(tmp_path, only(lab, "3.3"), files, limits=PATIENT).verdicts
    assert verdict.mistakes == (made.says,)


@each_task
def test_variants_are_spread_over_the_students(id):
    drawn = Counter(LABS[id].for_student(name).task(id).variant.name for name in NAMES)
    even = len(NAMES) / len(LABS[id].task(id).variants)
    assert all(abs(number - even) < 65 for number in drawn.values()), "four standard deviations"
    assert len(drawn) == len(LABS[id].task(id).variants)


def test_which_variant_a_student_has_depends_on_nothing_but_names():
    lab = find("pipelines")
    drawn = [lab.for_student(name).task("4.1").variant for name in NAMES[:12]]
    numbers = [lab.task("4.1").variants.index(variant) for variant in drawn]
    assert numbers == [1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0], "on any machine"
    for name in ("S0@x.org", " s0@X.ORG\n"):
        assert lab.for_student(name) == lab.for_student("s0@x.org")
    for name in ("two\nlines", "x" * 101, "\x1b[31m", "\ud800"):
        with pytest.raises(ValueError, match="a student is one line of at most 100 letters"):
            lab.for_student(name)


def test_a_folder_is_made_tested_and_graded_for_its_student(tmp_path, capsys):
    (alice, mine), (bob, his) = students_of("4.1")
    folder, users = tmp_path / "mine", tmp_path / "submission_metadata.json"
    assert main(["lab", "new", "pipelines", str(folder), "--student", alice.student.upper()]) == 0
    assert (folder / "lab.txt").read_text() == f"pipelines\n{alice.student}\n"
    files = changed(alice, mine.edits)
    hand_in(folder, {path: files[path] for path, _ in alice.task("4.1").targets})
    capsys.readouterr()
    assert main(["lab", "test", str(folder), "--task", "4.1"]) == 0
    assert f", for {alice.student}" in capsys.readouterr().out
    words = [str(folder), "--format", "gradescope", "--student", str(users)]
    for known, score in ([bob, alice], alice.task("4.1").points), ([bob], 0):  # of a group, one
        named = [{"email": lab.student.title(), "id": 7, "name": "S"} for lab in known]
        users.write_text(json.dumps({"users": named}))
        assert main(["lab", "grade", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["score"] == score
        copied = f"another student's version: {mine.says}; yours: {his.says}"
        assert (copied in found["tests"][0]["output"]) == (alice not in known)
        other = f"was made for {alice.student}; it is graded for {bob.student}"
        assert (other in found["output"]) == (alice not in known)
    for content, error in ((b"[" * 100_000, "has no users"), (b"\xff", "it is not UTF-8")):
        users.write_bytes(content)
        assert main(["lab", "grade", *words]) == 2
        assert error in capsys.readouterr().err
