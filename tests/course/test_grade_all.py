"""A whole class is graded: what is done stays done, and a bad submission costs only itself."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.course import class_report, grade_all, report
from minidist.course import submissions as reading
from minidist.course.grade_all import Result
from minidist.course.grader import Grade, Verdict
from minidist.course.sandbox.limits import Limits
from minidist.course.submissions import submissions
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.students import hand_in, reference
from tests.course.tiny import GPIPE, OTHER, TINY, Tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RIGHT = reference(TINY)
FILL = "yield from map(Forward, range(m))"
WRONG = RIGHT | {GPIPE: RIGHT[GPIPE].replace(FILL, "yield from map(Forward, range(m - 1))")}
HOSTILE = "\uff1d1: 9 points\n2 of 2\tzed\x1b\u202e"  # full-width, of two lines, turned round
PRINTED = r"\uff1d1: 9 points\x0a2 of 2\x09zed\x1b\x202e".replace(r"\uff1d", "\uff1d")


def hand_in_zip(file, files, root=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for path, source in files.items():
            archive.writestr(f"{root}minidist/{path}", source)


def run(folder, lab=TINY, seed=1, **more):
    """Return {name: result}."""
    results, done = folder.with_name("results"), []
    results.mkdir(exist_ok=True)
    job = grade_all.Job(lab, seed, results, **{"patience": 60, "limits": Limits(5), **more})
    grade_all.grade_all(submissions(folder), job, 2, done.append)
    return {result.name: result for result in done}


def test_folders_and_zips_are_graded_once_and_what_cannot_be_is_said(tmp_path):
    """As Moodle, Gradescope and GitHub give them."""
    folder = tmp_path / "all"
    hand_in(folder / "github-right", RIGHT)
    (folder / "github-right" / ".git").mkdir()
    hand_in(folder / "zipped folder" / "mine", WRONG)
    hand_in(folder / "begun", TINY.blanked())
    hand_in(folder / "other lab", RIGHT, "pipelines\nann")
    hand_in_zip(folder / "gradescope.zip", RIGHT, "mine/")
    hand_in_zip(folder / "Ann_12" / "mine.zip", WRONG)
    (folder / "broken.zip").write_bytes(b"PK\3\4 and no more")
    for name in ("=empty", HOSTILE, "__MACOSX"):
        (folder / name).mkdir()
    (folder / "link").symlink_to(folder / "github-right")
    (folder / "metadata.yml").write_text("{}")
    results = run(folder)
    sums = {name: result.sum for name, result in results.items() if result.points}
    assert sums.pop("Ann_12") == sums.pop("zipped folder") < 15
    assert sums == {"github-right": 15, "begun": 0, "gradescope.zip": 15}
    assert results["Ann_12"].causes.keys() == {"9.1"}
    assert results["begun"].causes["9.2"] == "not begun"
    whys = {name: result.why for name, result in results.items() if result.why}
    assert whys.keys() == {"broken.zip", "=empty", PRINTED, "link", "other lab"}
    assert "it is a link" in whys["link"] and "cannot be unpacked" in whys["broken.zip"]
    assert "has no folder minidist" in whys["=empty"]
    assert whys["other lab"] == "it is for lab pipelines, not for tiny"
    text = (tmp_path / "results" / "begun.txt").read_text(encoding="utf-8")
    assert "0 / 15  points" in text and (tmp_path / "results" / "begun.xml").is_file()
    hand_in(folder / "begun", RIGHT)
    again = run(folder)
    assert {name for name in results if again[name] != results[name] and name not in whys} == {
        "begun"
    }
    assert again["begun"].sum == 15


class Fragile(Tiny):
    tests = Path(__file__).with_name("fragile_tests.py")


def test_a_submission_that_ends_or_hangs_the_grader_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(grade_all, "ENDING", 0.5)
    lab = Fragile(**{**vars(TINY), "tasks": TINY.tasks[:1]})
    made = "def gpipe(rank, p, m):\n    return {}\n".format
    for name, source in {"a": made("[]"), "b": made("[1]"), "c": RIGHT[GPIPE]}.items():
        hand_in(tmp_path / "all" / name, {GPIPE: source})
    hand_in(tmp_path / "first" / "e", {GPIPE: RIGHT[GPIPE]})
    begin = time.monotonic()
    run(tmp_path / "first", lab)
    patience = max(5, round(2 * (time.monotonic() - begin)))  # of this machine, now
    found = run(tmp_path / "all", lab, patience=patience)
    assert {name: result.sum for name, result in found.items()} == {"a": 0, "b": 0, "c": 10}
    assert found["a"].why == "the grader's process ended"
    assert found["b"].why == f"the grader was not done in {patience} s"
    assert not found["a"].key and not found["b"].key, "the next run tries again"


def test_of_a_zip_only_the_labs_files_are_read_and_no_more_than_a_file_may_have(tmp_path):
    bombs = {"large.zip": zipfile.ZIP_DEFLATED, "b": zipfile.ZIP_BZIP2, "c": zipfile.ZIP_LZMA}
    for name, kind in bombs.items():
        with zipfile.ZipFile(tmp_path / name, "w", kind) as archive:
            for path in (f"minidist/{GPIPE}", "lab.txt"):
                archive.writestr(path, b"#" * (1 << 26))
            for path in ("../../x.py", "/etc/x.py", f"../../minidist/{OTHER}"):
                archive.writestr(path, RIGHT[OTHER])
    tracemalloc.start()
    for name in bombs:
        why = reading.handed_in(tmp_path / name, [GPIPE])[1][GPIPE]
        assert ("more than 1048576 bytes" if name == "large.zip" else "Deflate") in why
        assert reading.label(tmp_path / name) == ("", "")
    assert tracemalloc.get_traced_memory()[1] < 1 << 25, "it is not unpacked beyond that"
    tracemalloc.stop()
    hand_in_zip(tmp_path / "all" / "up.zip", RIGHT, "../")
    (tmp_path / "all" / "endless.zip").symlink_to("/dev/zero")
    sums = {name: result.sum for name, result in run(tmp_path / "all").items()}
    assert sums == {"up.zip": 15, "endless.zip": 0}, "its path is not followed"
    assert {path.name for path in tmp_path.iterdir()} == {*bombs, "all", "results"}


def test_a_damaged_result_is_none_and_long_names_have_results_of_their_own(tmp_path):
    file, right = tmp_path / "a.json", Result("a", "tiny", 1, "k", 1, {"9.1": 5})
    grade_all.save(right, file)
    assert grade_all.load(file) == right
    whole = json.loads(file.read_text())
    for damage in (
        *({"points": wrong} for wrong in ([1], {"9.1": "x"}, {"9.1": math.nan})),
        *({"causes": wrong} for wrong in (["x"], {"9.1": 1})),
        *({name: "x"} for name in ("score", "minutes", "seed")),
        *({name: [1]} for name in ("lab", "name", "student")),
    ):
        file.write_text(json.dumps(whole | damage))
        assert grade_all.load(file) is None, damage
    file.write_text("[" * 100_000)
    assert grade_all.load(file) is None
    names = {grade_all.place(tmp_path, Path("é" * 123 + end)) for end in ("a", "b", "abcd.zip")}
    assert len(names) == 3
    for name in names:
        name.with_suffix(".xml").touch()


def a_class():
    full, half, none = {"9.1": 10, "9.2": 5}, {"9.1": 10, "9.2": 0}, {"9.1": 0, "9.2": 0}
    made = [
        ("ann", full, {}, 1.5, "ann@x.org"),
        ("bob", half, {"9.2": "no sum"}, 1.25, "ann@x.org"),
        ("cy", none, {"9.1": "no sum", "9.2": "no sum"}, None, ""),
        ("cy.zip", none, {"9.1": "not begun"}, 1.5, ""),
        ("di", {}, {}, None, "di@x.org"),
    ]
    return [
        Result(name, "tiny", 1, "k", 0.5, points, causes, score, student)
        for name, points, causes, score, student in made
    ]


def test_the_table_counts_points_tasks_and_causes_and_shows_pairs_and_who_names_whom():
    said = class_report.summary(TINY, a_class(), {("ann", "bob"): 0.8, ("ann", "cy"): 0.1})
    assert "5 submissions, 1 not graded; points: mean 6, median 5; 2.5 minutes" in said
    assert re.findall(r"\d  #+ +(\d+) % and more", said) == ["0", "60", "100"]
    assert re.search(r"2  #+ +9\.1 .*\n +2  #+ +9\.2 |2  #+ +9\.2 .*\n +2  #+ +9\.1 ", said)
    assert re.search(r"2  #+  9\.2: no sum", said) and re.search(r"1  #+ +not begun", said)
    assert "   0.80  ann  bob" in said and "  ann  cy" not in said and "Leaderboard" not in said
    claims = [line.strip() for line in class_report.claims(a_class())]
    assert claims == [
        "bob names ann@x.org, as ann",
        "ann@x.org: ann, bob",
        "cy: cy, cy.zip",
        "no student: cy, cy.zip",
    ]
    assert class_report.claims(a_class()[2:3]) == [], "a class without students"


def test_a_class_is_ranked_by_score_ties_share_a_place_and_others_have_none():
    ranked = replace(TINY, leaderboard="time over bound")
    alone = replace(ranked, tasks=ranked.tasks[:1])
    said = class_report.summary(ranked, a_class(), {})
    assert "Leaderboard: time over bound\n    1  1.2500  bob\n    2  1.5000  ann\n    2  " in said
    head, *rows = csv.reader(class_report.as_csv(ranked, a_class(), {}, {}).splitlines())
    assert head[-2:] == ["score", "place"]
    assert [row[-1] for row in rows] == ["2", "1", "", "2", ""] and rows[1][-2] == "1.2500"
    for value, words in ((1.25, "1.2500\n"), (None, "none: an answer is not valid\n")):
        done = Grade(alone, [Verdict(alone.tasks[0], 3, [], score=value)], 1, "")
        words = f"for the leaderboard, time over bound (lower is better): {words}"
        assert words in report.text(done)
        assert ("leaderboard" in json.loads(report.gradescope(done))) == (value is not None)


def test_names_are_text_in_csv():
    signs = "=+-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b\u2212"  # also wide and small ones
    found = [*a_class(), *(Result(f" {sign}1", "tiny", 1) for sign in signs)]
    text = class_report.as_csv(TINY, found, {"bob": 1.0}, {("ann", "bob"): 0.75})
    rows = {row[0]: row for row in csv.reader(text.splitlines())}
    last = ["why", "like the package", "like", "share"]
    assert rows["name"] == ["name", "student", "9.1", "9.2", "sum", "seed", "minutes", *last]
    assert rows["bob"][1:6] == ["ann@x.org", "10", "0", "10", "1"]
    assert rows["bob"][-3:] == ["1.00", "ann", "0.75"] and rows["cy"][-3:] == ["", "", ""]
    assert rows.keys() >= {f"' {sign}1" for sign in signs}


COMMAND = """import sys
from minidist.cli import lab, main
from tests.course.tiny import TINY
lab.find = lambda name: TINY
sys.exit(main(["lab", *sys.argv[1:]]))"""


def command(*arguments, **more):
    words = [sys.executable, "-W", "error", "-c", COMMAND, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=PACKAGE.parent, start_new_session=True, **pipes, **more)


def left(word):
    """Return the processes whose variables have a word in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found += [entry.name] if os.fsencode(word) in (entry / "environ").read_bytes() else []
        except OSError:
            continue
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


def test_another_seed_and_regrade_grade_again_and_who_is_missing_has_a_row(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("minidist.cli.lab.find", lambda name: TINY)
    hand_in(tmp_path / "all" / "a", {OTHER: RIGHT[OTHER]}, "tiny")
    file = tmp_path / "here" / "a.json"
    where = [str(tmp_path / "all"), "--results", str(file.parent)]
    (tmp_path / "class.txt").write_text("zoe@x.org\n")
    assert main(["lab", "grade-all", *where, "--students", str(tmp_path / "class.txt")]) == 0
    said, rows = capsys.readouterr().out, (file.parent / "points.csv").read_text()
    assert "its student is '', who is not in the class" in said
    assert re.search(r"^,zoe@x.org,.*nothing that names this student was handed in", rows, re.M)
    for words, points in ("--seed 1", 5), ("", 3), ("--regrade", 5):
        assert main(["lab", "grade-all", *where, *words.split()]) == 0
        result = json.loads(file.read_text())
        assert result["seed"] == 1 and (result["minutes"] == 77) == (words == "")
        file.write_text(json.dumps(result | {"minutes": 77, "points": {"9.1": 0, "9.2": points}}))
    lines = re.findall("1 of 1  (.*)", capsys.readouterr().out)
    assert lines == ["a: 5 points", "a: 5 points", "a: 3 -> 5 points"]
