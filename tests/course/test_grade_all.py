"""A whole class is graded: what is done stays done, and a bad submission costs only itself."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minidist.cli import main
from minidist.course import class_report, grade_all
from minidist.course import submissions as reading
from minidist.course.lab import find
from minidist.course.sandbox.limits import Limits
from minidist.course.submissions import submissions
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import mistakes
from tests.course.students import changed, reference, starter
from tests.course.tiny import GPIPE, OTHER, TINY, Tiny

RIGHT = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in (GPIPE, OTHER)}
FILL = "yield from map(Forward, range(m))"
WRONG = RIGHT | {GPIPE: RIGHT[GPIPE].replace(FILL, "yield from map(Forward, range(m - 1))")}
NOTHING = "def gpipe(rank, p, m):\n    return []\n"
ALONE = "def gpipe(rank, p, m):\n    return [1]\n"


HOSTILE = "\uff1d1: 9 points\n2 of 2\tzed\x1b\u202e"  # full-width, of two lines, turned round
PRINTED = r"\uff1d1: 9 points\x0a2 of 2\x09zed\x1b\x202e".replace(r"\uff1d", "\uff1d")


def hand_in(folder, files):
    for path, source in files.items():
        (folder / "minidist" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "minidist" / path).write_text(source, encoding="utf-8")


def hand_in_zip(file, files, root=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for path, source in files.items():
            archive.writestr(f"{root}minidist/{path}", source)


class Fragile(Tiny):
    tests = Path(__file__).with_name("fragile_tests.py")


def run(folder, lab=TINY, seed=1, jobs=2, **more):
    """Return {name: result} and the names in the order in which they were done."""
    results, done = folder.with_name("results"), []
    results.mkdir(exist_ok=True)
    job = grade_all.Job(lab, seed, results, **{"patience": 60, "limits": Limits(5), **more})
    grade_all.grade_all(submissions(folder), job, jobs, done.append)
    return {result.name: result for result in done}


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    """Return a folder as Moodle, Gradescope and GitHub Classroom fill it."""
    folder = tmp_path_factory.mktemp("class") / "all"
    hand_in(folder / "github-right", RIGHT)
    (folder / "github-right" / ".git").mkdir()
    hand_in(folder / "zipped folder" / "mine", WRONG)
    hand_in(folder / "begun", TINY.blanked())
    hand_in_zip(folder / "gradescope.zip", RIGHT, "mine/")
    hand_in_zip(folder / "Ann_12_assignsubmission_file" / "mine.zip", WRONG)
    (folder / "broken.zip").write_bytes(b"PK\3\4 and no more")
    (folder / "=empty").mkdir()
    (folder / HOSTILE).mkdir()
    (folder / "link").symlink_to(folder / "github-right")
    (folder / "__MACOSX").mkdir()
    (folder / "metadata.yml").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def results(handed_in):
    return run(handed_in)


def test_folders_and_zips_are_graded_and_what_cannot_be_is_told(results):
    sums = {name: result.sum for name, result in results.items() if result.points}
    ann = "Ann_12_assignsubmission_file"
    assert sums.pop(ann) == sums.pop("zipped folder") < 15
    assert sums == {"github-right": 15, "begun": 0, "gradescope.zip": 15}
    assert results[ann].causes.keys() == {"9.1"} and results["begun"].causes["9.2"] == "not begun"
    whys = {name: result.why for name, result in results.items() if result.why}
    assert whys.keys() == {"broken.zip", "=empty", PRINTED, "link"}
    assert "it is a link" in whys["link"]
    assert "broken.zip cannot be unpacked" in whys["broken.zip"]
    assert "has no folder minidist" in whys["=empty"]


def test_a_submission_of_another_lab_or_of_nobody_in_the_class_is_not_graded(tmp_path):
    labels = {"mine": "tiny\nAnn", "other": "pipelines\nann", "ben": "tiny\nben", "nobody": "tiny"}
    for name, text in labels.items():
        hand_in(tmp_path / "all" / name, RIGHT)
        (tmp_path / "all" / name / "lab.txt").write_text(text)
    found = run(tmp_path / "all", students=frozenset({"ann"}))
    assert {name: (result.sum, result.why) for name, result in found.items()} == {
        "mine": (15, ""),
        "other": (0, "it is for lab pipelines, not for tiny"),
        "ben": (0, "its student is 'ben', who is not in the class"),
        "nobody": (0, "its student is '', who is not in the class"),
    }


def test_only_what_has_changed_is_graded_again(handed_in, results):
    hand_in(handed_in / "begun", RIGHT)
    again = run(handed_in)
    graded = {name for name in results if results[name].points}
    assert {name for name in graded if again[name] != results[name]} == {"begun"}
    assert again["begun"].sum == 15


def test_a_submission_that_ends_or_hangs_the_grader_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(grade_all, "ENDING", 0.5)
    lab = Fragile(**{**vars(TINY), "tasks": TINY.tasks[:1]})
    for name, source in {"a": NOTHING, "b": ALONE, "c": RIGHT[GPIPE], "d": RIGHT[GPIPE]}.items():
        hand_in(tmp_path / "all" / name, {GPIPE: source})
    hand_in(tmp_path / "first" / "e", {GPIPE: RIGHT[GPIPE]})
    begin = time.monotonic()
    run(tmp_path / "first", lab)
    patience = max(5, round(2 * (time.monotonic() - begin)))  # of this machine, now
    found = run(tmp_path / "all", lab, patience=patience)
    assert {name: result.sum for name, result in found.items()} == {
        "a": 0,
        "b": 0,
        "c": 10,
        "d": 10,
    }
    assert found["a"].why == "the grader's process ended"
    assert found["b"].why == f"the grader was not done in {patience} s"
    assert not found["a"].key and not found["b"].key, "the next run tries again"


def test_of_a_zip_only_the_labs_files_are_read_and_no_more_than_a_file_may_have(tmp_path):
    large, names = tmp_path / "all" / "large.zip", ["../../x.py", "/etc/x.py"]
    large.parent.mkdir()
    with zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"minidist/{GPIPE}", b"#" * (1 << 26))
        for name in [*names, f"../../minidist/{OTHER}"]:
            archive.writestr(name, RIGHT[OTHER])
    tracemalloc.start()
    assert "more than 1048576 bytes" in reading.handed_in(large, [GPIPE])[1][GPIPE]
    assert tracemalloc.get_traced_memory()[1] < 1 << 25, "it is not unpacked beyond that"
    tracemalloc.stop()
    hand_in_zip(tmp_path / "all" / "up.zip", RIGHT, "../")
    (tmp_path / "all" / "endless.zip").symlink_to("/dev/zero")
    found = run(tmp_path / "all")
    assert "more than 1048576 bytes" in found["large.zip"].causes["9.1"]
    sums = {name: result.sum for name, result in found.items()}
    assert sums == {"large.zip": 0, "up.zip": 15, "endless.zip": 0}, "its path is not followed"
    assert {path.name for path in tmp_path.iterdir()} == {"all", "results"}


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_of_a_zip_whose_unpacking_has_no_limit_nothing_is_read(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", kind) as archive:
        for name in (f"minidist/{GPIPE}", "lab.txt"):
            archive.writestr(name, b"#" * (1 << 26))
    tracemalloc.start()
    assert "Deflate" in reading.handed_in(tmp_path / "bomb.zip", [GPIPE])[1][GPIPE]
    assert reading.label(tmp_path / "bomb.zip") == ("", "")
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()


DAMAGED = [
    "[]",
    "[" * 100_000,
    {"points": [1]},
    {"points": {"9.1": "x"}},
    {"points": {"9.1": math.nan}},
    {"causes": ["x"]},
    {"causes": {"9.1": 1}},
    {"score": "x"},
    {"minutes": "x"},
    {"lab": [1]},
    {"name": None},
    {"student": 5},
    {"seed": "x"},
]


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_result_is_none(tmp_path, damage):
    file, right = tmp_path / "a.json", grade_all.Result("a", "tiny", 1, "k", 1, {"9.1": 5})
    grade_all.save(right, file)
    assert grade_all.load(file) == right
    whole = json.loads(file.read_text())
    file.write_text(damage if isinstance(damage, str) else json.dumps(whole | damage))
    assert grade_all.load(file) is None


def test_submissions_with_long_names_have_results_of_their_own(tmp_path):
    files = {grade_all.place(tmp_path, Path("é" * 123 + end)) for end in ("a", "b", "abcd.zip")}
    assert len(files) == 3
    for file in files:
        file.with_suffix(".xml").touch()


def test_names_are_text_in_csv(results):
    found = sorted(results.values(), key=lambda result: result.name)
    signs = "=+-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b\u2212"  # also wide and small ones
    found += [grade_all.Result(f" {sign}1", "tiny", 1) for sign in signs]
    pairs = {("begun", "gradescope.zip"): 0.75, ("begun", "zipped folder"): 0.5}
    text = class_report.as_csv(TINY, found, {"gradescope.zip": 1.0}, pairs)
    rows = {row[0]: row for row in csv.reader(text.splitlines())}
    last = ["why", "like the package", "like", "share"]
    assert rows["name"] == ["name", "student", "9.1", "9.2", "sum", "seed", "minutes", *last]
    assert rows["gradescope.zip"][1:6] == ["", "10", "5", "15", "1"]
    assert rows["gradescope.zip"][-3:] == ["1.00", "begun", "0.75"]
    assert rows["zipped folder"][-3:] == ["", "begun", "0.50"]
    assert rows["'=empty"][1:5] == ["", "", "", ""]
    assert rows.keys() >= {f"'{PRINTED}", *(f"' {sign}1" for sign in signs)}


def test_the_table_counts_points_failed_tasks_and_causes_and_shows_pairs():
    def result(name, points, **causes):
        return grade_all.Result(name, "tiny", 1, "k", 0.5, points, causes)

    full, half, none = {"9.1": 10, "9.2": 5}, {"9.1": 10, "9.2": 0}, {"9.1": 0, "9.2": 0}
    found = [result("a", full), result("b", half, **{"9.2": "no sum"})]
    found += [result("c", none, **{"9.1": "no sum", "9.2": "no sum"}), result("d", {})]
    said = class_report.summary(TINY, found, {("a", "b"): 0.8, ("a", "c"): 0.1})
    assert "4 submissions, 1 not graded; points: mean 8, median 10; 2.0 minutes" in said
    assert re.findall(r"1  #+ +(\d+) % and more", said) == ["0", "60", "100"]
    assert re.findall(r"(\d)  #+ +(9\.\d) ", said) == [("2", "9.2"), ("1", "9.1")]
    assert re.search(r"2  #+  9\.2: no sum\n +1  #+ +9\.1: no sum", said)
    assert "   0.80  a  b" in said and "  a  c" not in said


def test_whoever_names_a_classmate_and_two_folders_of_one_student_are_said():
    named = {"ann": "ann@x.org", "bob": "ann@x.org", "cy": "", "cy.zip": "", "di": "di@x.org"}
    results = [grade_all.Result(n, "tiny", 1, student=s) for n, s in named.items()]
    assert [line.strip() for line in class_report.claims(results)] == [
        "bob names ann@x.org, as ann",
        "ann@x.org: ann, bob",
        "cy: cy, cy.zip",
        "no student: cy, cy.zip",
    ]
    assert class_report.claims(results[2:3]) == [], "a class without students"


COMMAND = """import sys
from minidist.cli import lab, main
from tests.course.tiny import TINY
lab.find = lambda name: TINY
sys.exit(main(["lab", *sys.argv[1:]]))"""


def command(*arguments, **more):
    root = PACKAGE.parent
    words = [sys.executable, "-W", "error", "-c", COMMAND, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=root, start_new_session=True, **pipes, **more)


def left(word):
    """Return the processes whose words or variables have a word in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            both = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        found += [entry.name] if os.fsencode(word) in both else []
    return found


def test_ctrl_c_leaves_no_process_and_the_next_run_goes_on(tmp_path):
    folder, mark = tmp_path / "all", f"mark-of-{tmp_path.name}-{os.getpid()}"
    hand_in(folder / "a", RIGHT)
    hand_in(folder / "b", RIGHT | {GPIPE: "while True:\n    pass\n"})
    arguments = ["grade-all", folder, "--lab", "tiny", "--seconds", "60"]
    first = command(*arguments, env={**os.environ, "MARK": mark})
    assert first.stdout.readline() == "1 of 2  a: 15 points\n"
    assert left(mark), "the other one is being graded"
    os.killpg(first.pid, signal.SIGINT)
    said, errors = first.communicate(timeout=60)
    assert (first.returncode, said) == (130, "") and "Traceback" not in errors
    assert left(mark) == []
    [kept] = (tmp_path / "all.results").glob("*.json")
    before = kept.read_bytes()
    hand_in(folder / "b", RIGHT)
    again = command("grade-all", folder, "--seconds", "60", "--csv", tmp_path / "mine.csv")
    said, errors = again.communicate(timeout=60)
    assert (again.returncode, errors) == (0, "") and "2 submissions, 0 not graded" in said
    assert kept.read_bytes() == before, "also without a seed and the lab's name, which are kept"
    assert (tmp_path / "mine.csv").read_text().count(f",15,{json.loads(before)['seed']},") == 2


def test_another_seed_and_regrade_grade_again_and_show_changes(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("minidist.cli.lab.find", lambda name: TINY)
    hand_in(tmp_path / "all" / "a", {OTHER: RIGHT[OTHER]})
    (tmp_path / "all" / "a" / "lab.txt").write_text("tiny")
    file, seeds = tmp_path / "here" / "a.json", []
    where = [str(tmp_path / "all"), "--results", str(file.parent)]
    (tmp_path / "class.txt").write_text("zoe@x.org\n")
    assert main(["lab", "grade-all", *where, "--students", str(tmp_path / "class.txt")]) == 0
    said, rows = capsys.readouterr().out, (file.parent / "points.csv").read_text()
    assert "who is not in the class" in said
    assert re.search(r"^,zoe@x.org,.*nothing that names this student was handed in", rows, re.M)
    for words in (["--seed", "1"], [], ["--seed", "2"], ["--regrade"]):
        if "--regrade" in words:
            with monkeypatch.context() as patch:
                patch.setattr("minidist.cli.lab.grade_all", interrupted)
                assert main(["lab", "grade-all", *where, *words]) == 130
            words = ["--jobs", "1"]  # this run goes on with the same seed, and does regrade
        assert main(["lab", "grade-all", *where, *words]) == 0
        result = json.loads(file.read_text())
        assert (result["minutes"] == 77) == (words == [])
        seeds.append(result["seed"])
        points = {"9.1": 0, "9.2": 3} if "2" in words else result["points"]
        file.write_text(json.dumps(result | {"minutes": 77, "points": points}))
    assert seeds == [1, 1, 2, 2]
    lines = re.findall("1 of 1  (.*)", capsys.readouterr().out)
    assert lines == ["a: 5 points", "a: 5 points", "a: 5 points", "a: 3 -> 5 points"]
    suite = ElementTree.parse(file.with_suffix(".xml")).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("6", "3")
    assert " 5 / 15  points" in file.with_suffix(".txt").read_text(encoding="utf-8")


def test_wrong_words_get_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    hand_in(tmp_path / "one", RIGHT)
    (tmp_path / "all" / "a").mkdir(parents=True)
    (tmp_path / "latin").write_bytes(b"\xff")
    students = ["grade-all", "all", "--lab", "pipelines", "--students"]
    for words, said in [
        (["grade-all", "nowhere"], "has no submissions: a folder or .zip for each student"),
        (["grade-all", "one"], "has no submissions: a folder or .zip for each student"),
        (["grade-all", "empty"], "has no submissions: a folder or .zip for each student"),
        (["grade-all", "all"], "pass the name: --lab NAME"),
        (["grade-all", "all", "--lab", "magic"], "there is no lab 'magic'"),
        ([*students, str(tmp_path / "no")], "no: No such file or directory"),
        ([*students, str(tmp_path / "latin")], "latin: it is not UTF-8"),
    ]:
        assert main(["lab", words[0], str(tmp_path / words[1]), *words[2:]]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twelve_mixed_submissions_of_a_real_lab(tmp_path, capsys):
    lab, folder = find("pipelines"), tmp_path / "all"
    own = [mistake for mistake in mistakes().values() if mistake.task in ("4.1", "4.2", "4.4")]
    right, wrong = reference(lab), {m.name: changed(lab, m.edits) for m in own[::3][:3]}
    hand_in(folder / "right", right)
    hand_in(folder / "starter", lab.blanked())
    hand_in(folder / "some", starter(lab, ("4.1", "4.3")))
    hand_in_zip(folder / "right.zip", right)
    hand_in_zip(folder / "moodle" / "mine.zip", right, "mine/")
    for name, files in wrong.items():
        hand_in(folder / name, files)
    for name in (hostile := ["endless_loop", "kills_the_grader", "many_children", "os_exit"]):
        hand_in(folder / name, right)
        shutil.copytree(
            Path(__file__).with_name("attacks") / name, folder / name, dirs_exist_ok=True
        )
    arguments = ["--lab", lab.name, "--seed", "3", "--seconds", "10"]
    assert main(["lab", "grade-all", str(folder), *arguments]) == 0
    with (tmp_path / "all.results" / "points.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    sums = {name: int(row["sum"]) for name, row in rows.items()}
    assert len(sums) == 12 and all(sums[name] == 100 for name in ("right", "right.zip", "moodle"))
    assert sums["starter"] == 0 < sums["some"] < 100
    assert all(rows[name]["4.1"] == "0" and sums[name] > 0 for name in hostile), rows
    for name in wrong:
        result = json.loads((tmp_path / "all.results" / f"{name}.json").read_text())
        assert sums[name] < 100 and mistakes()[name].says[:150] in " ".join(
            result["causes"].values()
        )
    said = capsys.readouterr().out
    assert "12 submissions, 0 not graded" in said and len(said.splitlines()) < 60
