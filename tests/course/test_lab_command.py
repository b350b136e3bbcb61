"""`minidist lab` as a student and as a teacher meet it."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minidist.cli import main
from minidist.course import starter
from minidist.course.lab import find, labs, read
from minidist.course.submissions import label
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.students import hand_in, reference

ROOT = PACKAGE.parent
LABS = labs()
pytestmark = pytest.mark.slow


def test_a_starter_keeps_all_but_the_bodies_and_begins_with_a_map(tmp_path):
    for lab in LABS:
        starter.write(lab, tmp_path / lab.name)
        for path, source in lab.blanked().items():
            compile(source, path, "exec")
            stub = re.compile(r' +raise NotImplementedError\("Task \d+\.\d')
            package = iter((PACKAGE / path).read_text(encoding="utf-8").splitlines())
            stubs = [line for line in source.splitlines() if stub.match(line)]
            others = [line for line in source.splitlines() if not stub.match(line)]
            assert all(line in package for line in others), "the reference's lines, in their order"
            assert len(stubs) == sum(where == path for t in lab.tasks for where, _ in t.targets)
            text = (tmp_path / lab.name / "minidist" / path).read_text(encoding="utf-8")
            head = text.removesuffix(source)
            assert text.endswith(source) and re.fullmatch(r"(# .*\n){4,16}\n", head)
            here = [task for task in lab.tasks if path in dict(task.targets)]
            assert re.findall(r"^#   (\d+\.\d) ", head, re.M) == [task.id for task in here]
            assert all(name in head for task in here for p, name in task.targets if p == path)


def test_every_name_in_a_handout_exists():
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    for quoted in re.findall(r"`([^`\n]+)`", "\n".join(map(starter.handout, LABS))):
        if re.fullmatch(r"(?:minidist|lessons)/[\w/.]+", quoted):
            assert (ROOT / quoted).exists(), quoted
        else:
            for name in re.findall(r"[A-Za-z_]\w{3,}", quoted):
                assert name in words, (quoted, name)


def lab_command(*arguments, folder=ROOT):
    command = [sys.executable, "-W", "error", "-m", "minidist", "lab", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_from_a_new_lab_to_points(tmp_path):
    folder, report = tmp_path / "mine", tmp_path / "results.json"
    done = lab_command("new", "collectives", folder)
    assert done.returncode == 0 and "minidist lab test" in done.stdout
    assert not (folder / "minidist" / "__init__.py").exists(), "it would hide the package"
    done = lab_command("test", ".", folder=folder)
    assert done.returncode == 1 and done.stdout.endswith("  0 / 100  points\n")
    hand_in(folder, reference(find("collectives")))
    words = ["--seed", "7", "--format", "gradescope", "--output", report]
    done = lab_command("grade", folder, *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["score"] == 100 and results["extra_data"]["seed"] == 7


def test_watch_tests_again_when_a_file_is_saved(tmp_path, capsys, monkeypatch):
    folder, lab, waits = tmp_path / "mine", find("pipelines"), []
    starter.write(lab, folder)

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            hand_in(folder, reference(lab))
        if len(waits) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("minidist.cli.lab.sleep", wait)
    assert main(["lab", "test", str(folder), "--task", "4.1", "--watch"]) == 130
    said, points = capsys.readouterr().out, str(lab.tasks[0].points)
    assert re.findall(r"(\d+) / \d+  points", said) == ["0", points] and len(waits) == 5
    assert "4.2" not in said and "(not begun)" in said


def test_a_teacher_gets_a_release_a_solution_and_an_archive_that_grades(tmp_path):
    out, lab = tmp_path / "out", find("collectives")
    assert main(["lab", "export", "collectives", str(out), "--seed", "5", "--variants"]) == 0
    assert {path.name for path in out.iterdir()} == {"release", "instructor", "autograder.zip"}
    assert (out / "release" / "README.md").is_file()
    assert "seed" not in "".join(path.name for path in (out / "release").rglob("*"))
    assert (out / "instructor" / "test_collectives.py").is_file()
    assert (out / "instructor" / "seed.txt").read_text() == "5\n"
    for path in lab.files:
        solution = out / "instructor" / "solution" / "minidist" / path
        assert solution.read_bytes() == (PACKAGE / path).read_bytes()
    readme = (out / "instructor" / "README.md").read_text()
    assert re.search(r"\| 2.1 .* \| `\w+`(, `\w+`)* in `minidist/comm/collectives.py` \|", readme)
    source = tmp_path / "source"
    with zipfile.ZipFile(out / "autograder.zip") as archive:
        archive.extractall(source)
        modes = {e.filename: e.external_attr >> 16 & 0o777 for e in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    for script in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", source / script], check=True)
    setup = (source / "setup.sh").read_text()
    assert "'numpy>=" in setup and "'pytest>=" in setup
    (tmp_path / "results").mkdir()
    (tmp_path / "submission").symlink_to(out / "instructor" / "solution")
    users = {"users": [{"email": "ann@x.org"}]}
    (tmp_path / "submission_metadata.json").write_text(json.dumps(users))
    (tmp_path / "venv").symlink_to(sys.prefix)
    run = (source / "run_autograder").read_text()
    assert " --seed source/seed.txt " in run, "all users can read the words of a command"
    run = run.replace("/autograder", str(tmp_path))
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["score"] == 100, str(results)[:3000]


def test_the_name_of_the_lab_and_the_student_is_found_in_folders_and_zips(tmp_path):
    inner = hand_in(tmp_path / "a" / "mine", {"rng.py": "x"}, "\ufeffsplits\r\nalice@x.org\r\n")
    assert label(inner) == label(inner.parent) == ("splits", "alice@x.org")
    (tmp_path / "a" / "other" / "minidist").mkdir(parents=True)
    assert label(inner.parent) == label(tmp_path / "nowhere") == ("", ""), "which one is it?"
    (tmp_path / "moodle").mkdir()
    with zipfile.ZipFile(tmp_path / "moodle" / "mine.zip", "w") as archive:
        archive.writestr("mine/minidist/rng.py", "x")
        archive.writestr("mine/lab.txt", "splits\nbob@x.org")
    assert label(tmp_path / "moodle") == label(tmp_path / "moodle" / "mine.zip")
    assert label(tmp_path / "moodle") == ("splits", "bob@x.org")


def test_a_folder_of_another_lab_is_named(tmp_path, capsys):
    starter.write(find("splits"), tmp_path / "mine")
    arguments = ["grade", str(tmp_path / "mine"), "--lab", "collectives", "--format", "junit"]
    assert main(["lab", *arguments]) == 0
    said = capsys.readouterr()
    assert "its lab.txt says 'splits', the tests are of 'collectives'" in said.err
    suite = ElementTree.fromstring(said.out).find(".//testsuite")
    assert suite.get("failures") == suite.get("tests")


def test_wrong_words_get_one_line_and_exit_status_2(tmp_path, capsys, monkeypatch):
    for name in ("empty", "pipe/minidist", "endless/minidist", "large/minidist", "full", "all/a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "full" / "file").touch()
    (tmp_path / "latin").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe" / "lab.txt")
    (tmp_path / "endless" / "lab.txt").symlink_to("/dev/zero")
    (tmp_path / "large" / "lab.txt").write_text("x" * (1 << 20))
    monkeypatch.chdir(tmp_path)
    for words, said in {
        "new magic x": "there is no lab 'magic'; there is autograd",
        "export mutants x": "hand out `minidist lab new mutants`",
        "new autograd full": "is not empty; choose a new folder",
        "new autograd full/file": "cannot write into",
        "test nowhere": "there is no folder",
        "test empty": "has no lab.txt",
        "grade empty --lab autograd": "has no folder minidist",
        "grade . --lab autograd --output /no/x": "no folder /no",
        f"grade . --lab autograd --output {tmp_path}": "is a folder",
        "grade pipe": "has no lab.txt",
        "grade endless": "has no lab.txt",
        "grade large": "there is no lab 'xxx",
        "grade-all nowhere": "has no submissions: a folder or .zip for each student",
        "grade-all pipe": "has no submissions: a folder or .zip for each student",
        "grade-all all": "pass the name: --lab NAME",
        "grade-all all --lab pipelines --students no": "no: No such file or directory",
        "grade-all all --lab pipelines --students latin": "latin: it is not UTF-8",
    }.items():
        assert main(["lab", *words.split()]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1 and len(error) < 300
    words = ["grade", "empty", "--lab", "collectives", "--format", "gradescope"]
    assert main(["lab", *words, "--output", "results.json"]) == 2
    results = json.loads(Path("results.json").read_text(encoding="utf-8"))
    assert (
        results["score"] == 0 and "has no folder minidist; hand in minidist/" in results["output"]
    )


def test_a_lab_whose_files_do_not_fit_together_is_refused(tmp_path):
    (tmp_path / "handout.md").write_text("About.\n\n## Task 1.2\n\nText.\n")
    head = 'number = 1\ntitle = "x"\nlessons = []\n[task."1.{}"]\n'.format
    rest = 'title = "y"\nminutes = 5\ndifficulty = 1\nblanks = []\nnumbers = []\nhints = []\n'
    variant = '[v]\ntask = "1.{}"\nasks = "a"\n{}'.format
    for text, variants, why in [
        (head(2), "", r"/lab\.toml: missing or unknown in a task: blanks"),
        (head(1) + rest, "", r"handout\.md differ in task 1\.2, 1\.1"),
        (head(2) + rest, variant(9, 'says = "b"'), "v has no asks, no says, or no task of the lab"),
        (head(2) + rest, variant(2, ""), "v has no asks, no says, or no task of the lab"),
    ]:
        (tmp_path / "lab.toml").write_text(text)
        (tmp_path / "variants.toml").write_text(variants)
        with pytest.raises(ValueError, match=why):
            read(tmp_path)
