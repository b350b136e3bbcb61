"""`minidist lab` as a student and as a teacher meet it."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.course import starter
from minidist.course.lab import find, labs, read
from minidist.course.submissions import label
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course import students

ROOT = PACKAGE.parent
LABS = labs()
each_lab = pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.name)


@each_lab
def test_a_starter_keeps_all_but_the_bodies_of_its_tasks(lab):
    for path, source in lab.blanked().items():
        compile(source, path, "exec")
        stub = re.compile(r' +raise NotImplementedError\("Task \d+\.\d')
        reference = iter((PACKAGE / path).read_text(encoding="utf-8").splitlines())
        stubs = [line for line in source.splitlines() if stub.match(line)]
        others = [line for line in source.splitlines() if not stub.match(line)]
        assert all(line in reference for line in others), "the reference's lines, in their order"
        assert len(stubs) == sum(where == path for t in lab.tasks for where, _ in t.targets)


@each_lab
def test_a_starters_file_begins_with_a_map_of_about_ten_lines(lab, tmp_path):
    starter.write(lab, tmp_path / "mine")
    for path, source in lab.blanked().items():
        text = (tmp_path / "mine" / "minidist" / path).read_text(encoding="utf-8")
        head = text.removesuffix(source)
        assert text.endswith(source) and 5 <= len(head.splitlines()) <= 16
        assert re.fullmatch(r"(# .*\n)+\n", head)
        here = [task for task in lab.tasks if path in dict(task.targets)]
        assert re.findall(r"^#   (\d+\.\d) ", head, re.M) == [task.id for task in here]
        assert all(name in head for task in here for p, name in task.targets if p == path)
        assert all(
            (PACKAGE / p).is_file()
            for p in re.findall(r"(?<!/)\b[a-z]\w*/[\w/]+\.py", head)
            if not p.startswith("lessons/")
        )


@each_lab
def test_every_name_in_a_handout_exists(lab):
    text = starter.handout(lab)
    for line in re.findall(r"^## Task .*\n\n(Write .*)", text, re.M):
        files = re.findall(r"`(minidist/[^`]+)`", line)
        assert files and len(set(files)) == len(files), "a file is named once per task"
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"(?:minidist|lessons)/[\w/.]+", quoted):
            assert (ROOT / quoted).exists(), quoted
        else:
            for name in re.findall(r"[A-Za-z_]\w{3,}", quoted):
                assert name in words, (quoted, name)


def lab_command(*arguments, folder=ROOT):
    command = [sys.executable, "-W", "error", "-m", "minidist", "lab", *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )


def solve(folder, task):
    """Put the package's files in the place of all in which a task has bodies."""
    for path, _ in task.targets:
        (folder / "minidist" / path).write_bytes((PACKAGE / path).read_bytes())


def test_from_a_new_lab_to_points(tmp_path):
    folder = tmp_path / "mine"
    done = lab_command("new", "pipelines", folder)
    assert done.returncode == 0 and "minidist lab test" in done.stdout
    assert not (folder / "minidist" / "__init__.py").exists(), "it would hide the package"
    done = lab_command("test", ".", folder=folder)
    assert done.returncode == 1 and done.stdout.endswith("  0 / 100  points\n")
    solve(folder, find("pipelines").tasks[0])
    report = tmp_path / "results.json"
    done = lab_command("grade", folder, "--seed", "7", "--format", "gradescope", "--output", report)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    results = json.loads(report.read_text(encoding="utf-8"))
    points = find("pipelines").tasks[0].points
    assert results["score"] == points == results["tests"][0]["score"] > 0
    assert results["extra_data"]["seed"] == 7 and "defences" in results["extra_data"]


def test_watch_tests_again_when_a_file_is_saved(tmp_path, capsys, monkeypatch):
    folder, waits = tmp_path / "mine", []
    starter.write(find("pipelines"), folder)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            solve(folder, find("pipelines").tasks[0])
        if len(waits) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("minidist.cli.lab.sleep", wait)
    assert main(["lab", "test", str(folder), "--task", "4.1", "--watch"]) == 130
    said, points = capsys.readouterr().out, str(find("pipelines").tasks[0].points)
    assert re.findall(r"(\d+) / \d+  points", said) == ["0", points] and len(waits) == 5
    assert "4.2" not in said and "(not begun)" in said


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the folder that a teacher gets."""
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["lab", "export", "collectives", str(out), "--seed", "5"]) == 0
    return out


def test_what_a_teacher_gets(exported):
    out = exported
    ways = {"autograder.zip", "plain"}
    assert {path.name for path in out.iterdir()} == {"release", "instructor", *ways}
    assert (out / "release" / "README.md").is_file()
    assert "seed" not in "".join(path.name for path in (out / "release").rglob("*"))
    assert (out / "instructor" / "test_collectives.py").is_file()
    assert (out / "instructor" / "seed.txt").read_text() == "5\n"
    solution = out / "instructor" / "solution"
    lab = next(lab for lab in LABS if lab.name == "collectives")
    for path in lab.files:  # test_labs.py has them graded: 100 points for any seed
        assert (solution / "minidist" / path).read_bytes() == (PACKAGE / path).read_bytes()
    readme = (out / "instructor" / "README.md").read_text()
    assert re.search(r"\| 2.1 .* \| `\w+`(, `\w+`)* in `minidist/comm/collectives.py` \|", readme)


def test_the_name_of_a_lab_is_found_in_a_zipped_folder_and_past_a_byte_order_mark(tmp_path):
    inner = tmp_path / "alice" / "mine"
    starter.write(next(lab for lab in LABS if lab.name == "splits"), inner)
    (inner / "lab.txt").write_bytes(b"\xef\xbb\xbfsplits\r\n")
    assert label(inner) == label(inner.parent) == ("splits", "")
    (tmp_path / "alice" / "other" / "minidist").mkdir(parents=True)
    assert label(inner.parent) == ("", ""), "which one is it?"


def test_a_folder_of_another_lab_is_told(tmp_path, capsys):
    starter.write(next(lab for lab in LABS if lab.name == "splits"), tmp_path / "mine")
    arguments = ["grade", str(tmp_path / "mine"), "--lab", "collectives", "--format", "junit"]
    assert main(["lab", *arguments]) == 0
    said = capsys.readouterr()
    assert "its lab.txt says 'splits', the questions are of 'collectives'" in said.err
    assert "there is no minidist/comm/collectives.py" in said.out
    suite = ElementTree.fromstring(said.out).find(".//testsuite")
    assert suite.get("failures") == suite.get("tests")


def shell(command, folder, **variables):
    """Run a command as GitHub does, in this environment."""
    paths = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, **paths, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_the_plain_folder_grades_a_class_into_junit_files_and_a_table(exported, tmp_path):
    lab, plain = find("collectives"), tmp_path / "plain"
    shutil.copytree(exported / "plain", plain)
    for name, done in {"ann": ("2.1",), "bob": ()}.items():
        for path, source in students.starter(lab, done).items():
            target = plain / "submissions" / name / "minidist" / path
            target.parent.mkdir(parents=True)
            target.write_text(source, encoding="utf-8")
    shutil.make_archive(str(plain / "submissions" / "bob"), "zip", plain / "submissions" / "bob")
    shutil.rmtree(plain / "submissions" / "bob")
    graded = shell("bash plain/grade.sh --jobs 1", tmp_path)
    assert graded.returncode == 0, graded.stderr
    with (plain / "points.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    first = lab.task("2.1").points
    assert {name: (row["sum"], row["seed"]) for name, row in rows.items()} == {
        "ann": (str(first), "5"),
        "bob.zip": ("0", "5"),
    }
    for name, sum_ in (("ann", first), ("bob.zip", 0)):
        root = ElementTree.parse(plain / "results" / f"{name}.xml")
        points = {p.get("name"): p.get("value") for p in root.find("testsuite/properties")}
        assert points["points"] == str(sum_)
        text = (plain / "results" / f"{name}.txt").read_text(encoding="utf-8")
        assert f"{sum_:>3} / 100  points" in text


@pytest.mark.slow
def test_the_archive_grades_the_solution_by_itself(exported, tmp_path):
    with zipfile.ZipFile(exported / "autograder.zip") as archive:
        archive.extractall(tmp_path / "source")
        modes = {e.filename: e.external_attr >> 16 & 0o777 for e in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    source = tmp_path / "source"
    assert "numpy" in (source / "setup.sh").read_text()
    for script in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", source / script], check=True)
    [close] = [line for line in (source / "setup.sh").read_text().splitlines() if "chmod" in line]
    subprocess.run(["bash", "-c", close.replace("/autograder", str(tmp_path))], check=True)
    (tmp_path / "results").mkdir()
    (tmp_path / "submission").symlink_to(exported / "instructor" / "solution")
    (tmp_path / "venv").symlink_to(sys.prefix)
    run = (source / "run_autograder").read_text()
    assert " --seed source/seed.txt " in run, "all users can read the words of a command"
    run = run.replace("/autograder", str(tmp_path))
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["score"] == 100, str(results)[:3000]


def test_what_cannot_be_graded_is_told_to_gradescope(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    arguments = ["grade", str(tmp_path / "empty"), "--lab", "collectives", "--format", "gradescope"]
    report = tmp_path / "results.json"
    assert main(["lab", *arguments, "--output", str(report)]) == 2
    said = "has no folder minidist; hand in minidist/comm/collectives.py, in these folders"
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["score"] == 0 and said in results["output"]
    assert said in capsys.readouterr().err


def test_wrong_words_get_one_line_and_exit_status_2(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name in ("empty", "pipe", "endless", "large"):
        (tmp_path / name).mkdir()
    for name in ("pipe", "endless", "large"):
        (tmp_path / name / "minidist").mkdir()
    os.mkfifo(tmp_path / "pipe" / "lab.txt")
    (tmp_path / "endless" / "lab.txt").symlink_to("/dev/zero")
    (tmp_path / "large" / "lab.txt").write_text("x" * (1 << 20))
    for arguments, words in [
        (["new", "magic", str(tmp_path / "x")], "there is no lab 'magic'; there is autograd"),
        (["new", "magic", str(tmp_path / "x")], "hybrid, context"),
        (["export", "mutants", str(tmp_path / "x")], "hand out `minidist lab new mutants`"),
        (["new", "autograd", str(tmp_path / "full")], "is not empty; choose a new folder"),
        (["new", "autograd", str(tmp_path / "full" / "file")], "cannot write into"),
        (["test", str(tmp_path / "nowhere")], "there is no folder"),
        (["test", str(tmp_path / "empty")], "has no lab.txt"),
        (["grade", str(tmp_path / "empty"), "--lab", "autograd"], "has no folder minidist"),
        (["grade", str(tmp_path), "--lab", "autograd", "--output", "/no/x"], "no folder /no"),
        (["grade", str(tmp_path), "--lab", "autograd", "--output", str(tmp_path)], "is a folder"),
        (["grade", str(tmp_path / "pipe")], "has no lab.txt"),
        (["grade", str(tmp_path / "endless")], "has no lab.txt"),
        (["grade", str(tmp_path / "large")], "there is no lab 'xxx"),
    ]:
        assert main(["lab", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1 and len(error) < 300


def test_a_lab_with_a_key_missing_or_unknown_or_without_its_text_is_refused(tmp_path):
    (tmp_path / "handout.md").write_text("About.\n\n## Task 1.2\n\nText.\n")
    head = 'number = 1\ntitle = "x"\nlessons = []\n[task."1.1"]\n'
    (tmp_path / "lab.toml").write_text(head)
    with pytest.raises(ValueError, match=r"/lab\.toml: missing or unknown in a task: blanks"):
        read(tmp_path)
    rest = 'title = "y"\nminutes = 5\ndifficulty = 1\nblanks = []\nnumbers = []\nhints = []\n'
    (tmp_path / "lab.toml").write_text(head + rest)
    with pytest.raises(ValueError, match=r"handout\.md differ in task 1\.2, 1\.1"):
        read(tmp_path)
