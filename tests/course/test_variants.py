"""Variants: each student has one of several versions of a task, and no other one is right."""

import json
import zipfile
from collections import Counter
from dataclasses import replace

import pytest

from minidist.cli import main
from minidist.course import grade_all, starter
from minidist.course.diagnosis import mistakes_of
from minidist.course.export import export
from minidist.course.lab import find, labs, read
from minidist.course.sandbox.limits import Limits
from minidist.course.submissions import label
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import Mistake, mistakes
from tests.course.in_process import cases
from tests.course.students import changed, graded, only, reference
from tests.course.tiny import GPIPE, OTHER, TINY

LABS = {task.id: lab for lab in labs() for task in lab.tasks if task.variants}
each_task = pytest.mark.parametrize("id", LABS)
NAMES = [f"s{n}@x.org" for n in range(1000)]


def students_of(id):
    """Return (the lab of a student, what it asks) for each variant of a task."""
    found = {}
    for name in NAMES[:40]:
        lab = LABS[id].for_student(name)
        found.setdefault(lab.task(id).variant.name, lab)
    return [(found[variant.name], variant) for variant in LABS[id].task(id).variants]


def test_variants_are_of_a_placement_orders_a_layout_and_a_number_format():
    assert {"3.3", "4.1", "5.5", "6.1", "8.4"} <= LABS.keys()


@each_task
def test_a_variant_says_what_it_asks_and_applies_to_the_package(id):
    variants = LABS[id].task(id).variants
    assert len(variants) in (2, 3) and all(variant.edits for variant in variants)
    assert len({(v.asks, v.says) for v in variants}) == len(variants)
    for variant in variants:
        for path, source in variant.files().items():
            compile(source, path, "exec")
            assert path in dict(LABS[id].task(id).targets)


@each_task
def test_two_right_answers_differ_and_another_students_is_wrong(id):
    for lab, mine in students_of(id):
        rest = [own for own in lab.variants if own.task != id]
        for variant in lab.task(id).variants:
            wrong = [case.wrong for case in cases(lab, id, *rest, variant) if case.wrong]
            assert bool(wrong) == (variant != mine), (mine.name, variant.name, wrong)


@pytest.mark.slow
@each_task
def test_the_own_answer_earns_all_points_and_a_copied_one_names_both_versions(tmp_path, id):
    for lab, mine in students_of(id):
        for variant in lab.task(id).variants:
            found = graded(tmp_path, only(lab, id), changed(lab, variant.edits), seed=3)
            (verdict,) = found.verdicts
            if variant == mine:
                assert verdict.passed and found.points == verdict.task.points, verdict.wrong
                continue
            assert verdict.points < verdict.task.points
            both = f"another student's version: {variant.says}; yours: {mine.says}"
            assert verdict.mistakes == (f"it is {both}",), verdict.wrong
        (verdict,) = graded(tmp_path, only(lab, id), reference(lab), seed=3).verdicts
        assert verdict.points < verdict.task.points
        assert verdict.mistakes == (f"it is the package's own version; yours: {mine.says}",)


@pytest.mark.slow
@each_task
def test_all_of_a_lab_can_be_right_for_each_variant(tmp_path, id):
    for lab, variant in students_of(id):
        found = graded(tmp_path, lab, changed(lab, [e for own in lab.variants for e in own.edits]))
        assert found.points == 100, (variant.name, [v.wrong for v in found.verdicts])


@pytest.mark.slow
def test_a_mistake_in_a_students_own_version_is_named(tmp_path):
    (lab, mine), (made,) = students_of("3.3")[1], [mistakes()["bucket_per_parameter"]]
    assert mine.edits and len(list(mistakes_of(lab, lab.task("3.3")))) > 1
    files = changed(lab, [*mine.edits, *made.edits])
    (verdict,) = graded(tmp_path, only(lab, "3.3"), files).verdicts
    assert verdict.mistakes == (made.says,)


@each_task
def test_variants_are_spread_over_the_students(id):
    drawn = Counter(LABS[id].for_student(name).task(id).variant.name for name in NAMES)
    even = len(NAMES) / len(LABS[id].task(id).variants)
    assert all(abs(number - even) < 65 for number in drawn.values()), "four standard deviations"
    assert len(drawn) == len(LABS[id].task(id).variants)


def test_which_variant_a_student_has_depends_on_nothing_but_names():
    lab = find("pipelines")
    assert numbers(lab, "4.1") == [1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0], "on any machine"
    assert numbers(LABS["6.1"], "6.1") != numbers(lab, "4.1"), "each lab draws anew"
    for name in ("S0@x.org", " s0@X.ORG\n"):
        assert lab.for_student(name) == lab.for_student("s0@x.org")


def numbers(lab, id):
    """Return which variant each of 12 students has."""
    drawn = [lab.for_student(name).task(id).variant for name in NAMES[:12]]
    return [lab.task(id).variants.index(variant) for variant in drawn]


@each_task
def test_a_starter_asks_for_the_students_version_and_gives_no_hint_of_another(id):
    (path, *_) = dict(LABS[id].task(id).targets)
    for lab, mine in students_of(id):
        text = starter.handout(lab)
        section = text[text.index(f"## Task {id}") :].partition("\n## ")[0]
        assert f"The version of {lab.student}.** {mine.asks}" in section
        assert f"yours: {mine.says}" in starter.map_of(lab, path).replace("\n#       ", "")
        assert (mine.hint or LABS[id].task(id).hints[-1]) in section
        others = [v for v in lab.task(id).variants if v != mine]
        assert not any(v.asks in text for v in others)
        assert not any(v.hint in text for v in others if v.hint not in ("", mine.hint))


@each_task
def test_without_a_student_nothing_changes(id):
    lab = LABS[id]
    assert lab.for_student(" ") == lab and not lab.variants and not lab.task(id).variant
    text = starter.handout(lab)
    assert not any(variant.asks in text for variant in lab.task(id).variants)


def write(folder, files, label):
    for path, source in files.items():
        (folder / "minidist" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "minidist" / path).write_text(source, encoding="utf-8")
    (folder / "lab.txt").write_text(label)


def test_a_folder_is_made_tested_and_graded_for_its_student(tmp_path, capsys):
    (alice, mine), (bob, his) = students_of("4.1")
    folder, users = tmp_path / "mine", tmp_path / "submission_metadata.json"
    words = ["pipelines", str(folder), "--student", alice.student.upper()]
    assert main(["lab", "new", *words]) == 0
    assert (folder / "lab.txt").read_text() == f"pipelines\n{alice.student}\n"
    files = changed(alice, mine.edits)
    for path, _ in alice.task("4.1").targets:
        (folder / "minidist" / path).write_text(files[path], encoding="utf-8")
    capsys.readouterr()
    assert main(["lab", "test", str(folder), "--task", "4.1"]) == 0
    assert f", for {alice.student}" in capsys.readouterr().out
    points = alice.task("4.1").points
    for known, score in (([bob, alice], points), ([bob], 0)):  # a group hands in together
        named = [{"email": lab.student.title(), "id": 7, "name": "S"} for lab in known]
        users.write_text(json.dumps({"users": named}))
        words = [str(folder), "--format", "gradescope", "--student", str(users)]
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


def test_gradescope_grades_everybodys_own_version_if_asked_to(tmp_path):
    export(find("collectives"), tmp_path / "out", 1, variants=True)
    with zipfile.ZipFile(tmp_path / "out" / "autograder.zip") as archive:
        assert " --student submission_metadata.json \\\n" in archive.read("run_autograder").decode()


@pytest.mark.parametrize("name", ["two\nlines", "x" * 101, "\x1b[31m", "\ud800"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="a student is one line of at most 100 letters"):
        find("pipelines").for_student(name)


def student_of(path):
    return label(path)[1]


def test_the_student_is_found_in_folders_and_zips(tmp_path):
    inner = tmp_path / "a" / "mine"
    write(inner, {OTHER: "x"}, "\ufefftiny\r\nalice@x.org\r\n")
    assert label(inner) == label(inner.parent) == ("tiny", "alice@x.org")
    (tmp_path / "moodle").mkdir()
    with zipfile.ZipFile(tmp_path / "moodle" / "mine.zip", "w") as archive:
        archive.writestr(f"mine/minidist/{OTHER}", "x")
        archive.writestr("mine/lab.txt", "tiny\nbob@x.org")
    assert student_of(tmp_path / "moodle") == student_of(tmp_path / "moodle" / "mine.zip")
    assert student_of(tmp_path / "moodle") == "bob@x.org"
    for text in ("tiny\n", ""):
        write(inner, {}, text)
        assert student_of(inner) == ""
    assert student_of(tmp_path / "nowhere") == ""


@pytest.mark.slow
def test_a_class_is_graded_by_everybodys_version(tmp_path):
    edit = Edit(f"{GPIPE}:gpipe", "range(m)", "reversed(range(m))")
    versions = (Mistake("own", (), "9.1", "last"), Mistake("other", (edit,), "9.1", "first"))
    lab = replace(
        TINY, tasks=[replace(TINY.tasks[0], hints=[""], variants=versions), TINY.tasks[1]]
    )
    by_version = {lab.for_student(name).tasks[0].variant.name: name for name in NAMES[:20]}
    for folder in ("own", "other", "none"):
        student = by_version.get(folder, "")
        write(tmp_path / "all" / folder, reference(lab), f"tiny\n{student}\n")
    done, results = {}, tmp_path / "results"
    results.mkdir()
    job = grade_all.Job(lab, 1, results, 60, Limits(5))
    paths = sorted((tmp_path / "all").iterdir())
    grade_all.grade_all(paths, job, 1, lambda result: done.update({result.name: result}))
    assert {name: result.sum for name, result in done.items()} == {
        "own": 15,
        "other": 5,
        "none": 15,
    }
    assert "another student's version: last; yours: first" in done["other"].causes["9.1"]
    assert {r.student for r in done.values()} == {*by_version.values(), ""}


def test_a_variant_of_no_task_or_without_words_is_refused(tmp_path):
    lab = PACKAGE / "course" / "labs" / "pipelines"
    for name in ("lab.toml", "handout.md"):
        (tmp_path / name).write_bytes((lab / name).read_bytes())
    for text in ('[x]\ntask = "4.9"\nasks = "a"\nsays = "b"', '[x]\ntask = "4.1"\nasks = "a"'):
        (tmp_path / "variants.toml").write_text(text)
        with pytest.raises(ValueError, match="x has no asks, no says, or no task of the lab"):
            read(tmp_path)
