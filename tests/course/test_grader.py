"""A folder is graded: every task by itself, whatever the others do, and said in three formats."""

import itertools
import json
import os
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from minidist.course import report
from minidist.course.answers import check, check_form, like_the_package
from minidist.course.diagnosis import same
from minidist.course.grader import Grade, Verdict, grade, handed_in, untouched
from minidist.course.grading import in_words
from minidist.course.lab import shares
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import Limits
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.students import graded, hand_in, reference
from tests.course.tiny import GPIPE, MODULE, OTHER, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test waits for all
RIGHT = reference(TINY)
FILL = "yield from map(Forward, range(m))"
SHORT = 'print("filled", __file__)\nyield from map(Forward, range(m - 1))'
WRONG = Edit(f"{GPIPE}:gpipe", SHORT, FILL).apply(RIGHT[GPIPE])
BEGUN = TINY.blanked()[GPIPE].replace("raise Not", "m += 1\n    raise  Not")
HANDED_IN = {
    "reference": RIGHT,
    "starter": TINY.blanked(),
    "begun": {GPIPE: BEGUN, OTHER: RIGHT[OTHER]},
    "one task": {OTHER: RIGHT[OTHER]},
    "wrong": RIGHT | {GPIPE: WRONG},
    "no Python": RIGHT | {GPIPE: "def gpipe(rank)\n"},
    "endless": RIGHT | {GPIPE: "def gpipe(s, p, m):\n    while True:\n        m += 1\n"},
}
OPTIONS = {"wrong": {"seed": 4}, "endless": {"limits": Limits(3)}}


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """Return {what is handed in: its grade}."""
    return {
        name: graded(tmp_path_factory.mktemp("a"), TINY, files, **OPTIONS.get(name, {}))
        for name, files in HANDED_IN.items()
    }


def test_each_task_has_its_own_points_whatever_the_other_is(grades):
    points = {name: [v.points for v in grade.verdicts] for name, grade in grades.items()}
    assert points.pop("reference") == [10, 5] and points.pop("starter") == [0, 0]
    assert set(map(tuple, points.values())) == {(0, 5)}
    first = {name: grade.verdicts[0] for name, grade in grades.items()}
    assert not any(verdict.begun for verdict in grades["starter"].verdicts)
    assert report.text(grades["starter"]).count("(not begun)") == 2
    assert all("NotImplementedError: Task 9.1" in text for text in first["begun"].wrong)
    assert first["one task"].wrong == [f"there is no minidist/{GPIPE}"]
    assert first["no Python"].wrong[0].startswith(f"{GPIPE}:")
    wrong, *others = first["endless"].wrong
    assert re.search(rf"stopped after 3 s; .*\n +{GPIPE}, line [23], in gpipe\n", wrong), wrong
    assert all("not asked any more" in other for other in others)
    both = replace(TINY.tasks[0], blanks=[f"{GPIPE}: gpipe", f"{OTHER}: one_f_one_b"])
    files = replace(TINY, tasks=[both]).blanked()
    assert untouched(both, files) and not untouched(both, files | {OTHER: RIGHT[OTHER]})


def test_a_wrong_answer_says_what_is_wrong_what_was_printed_and_the_same_for_a_seed(
    tmp_path, grades
):
    result = grades["wrong"]
    assert result.verdicts[0].output.startswith(f"filled minidist/{GPIPE}\n")
    line = r"p 1, schedule gpipe, m \d: the program on rank 0 is \['F0', .*\], not \['F0'"
    said = report.text(result)
    assert re.search(line, said) and " 5 / 15  points" in said and "seed: 4" in said
    again, other = (graded(tmp_path, TINY, HANDED_IN["wrong"], seed) for seed in (4, 5))
    wrong = [[verdict.wrong for verdict in each.verdicts] for each in (result, again, other)]
    assert wrong[0] == wrong[1] != wrong[2]


def test_one_task_alone_is_asked_and_reported(tmp_path):
    result = graded(tmp_path, TINY, RIGHT, None, task="9.2")
    assert [verdict.task.id for verdict in result.verdicts] == ["9.2"]
    assert result.points == result.lab.points == 5
    with pytest.raises(ValueError, match=r"lab tiny has no task '9\.3'; it has 9\.1, 9\.2"):
        grade(tmp_path, TINY, task="9.3")


def test_points_are_whole_and_none_is_lost_and_a_group_of_tests_earns_its_share():
    assert shares(100, [1, 1, 1]) == [34, 33, 33] and shares(10, [10, 20, 45]) == [1, 3, 6]
    for passed, points in (({"a": True, "b": False, "c": True}, 7), ({"a": False}, 0)):
        assert Verdict(TINY.tasks[0], 9, ["wrong"], groups=passed).points == points
    half = Verdict(TINY.tasks[0], 9, ["no"], groups={"a": True, "b": False})
    said = report.text(Grade(TINY, [half], 0, ""))
    assert " 5 / 10" in said and "answered: a (5); not yet: b (5)" in said


def test_only_regular_files_within_the_folder_are_taken(tmp_path):
    theirs, files = hand_in(tmp_path / "theirs", RIGHT), [GPIPE, OTHER]
    assert handed_in(theirs, files) == (RIGHT, {}) == handed_in(tmp_path, files)
    one, other = (theirs / "minidist" / path for path in files)
    one.unlink(), other.unlink()
    assert handed_in(theirs, files) == ({}, {})
    one.symlink_to(PACKAGE / GPIPE)
    assert "leads out of the folder" in handed_in(theirs, files)[1][GPIPE]
    for make, why in [
        (lambda: os.mkfifo(other), "not a regular file"),
        (lambda: other.write_bytes(b"#" * ((1 << 20) + 1)), "more than 1048576 bytes"),
        (lambda: other.write_bytes(b"\xff"), "not UTF-8"),
        (lambda: other.symlink_to(other), ""),
    ]:
        make()
        assert why in handed_in(theirs, files)[1][OTHER]
        other.unlink()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "minidist").symlink_to(PACKAGE)
    assert handed_in(tmp_path / "link", files)[1].keys() == {GPIPE, OTHER}
    hand_in(tmp_path / "two" / "a", RIGHT), hand_in(tmp_path / "two" / "b", RIGHT)
    for folder, why in {"missing": "there is no folder", "two": "has no folder minidist"}.items():
        with pytest.raises(ValueError, match=why):
            handed_in(tmp_path / folder, files)


def test_an_error_is_shown_where_it_is_in_the_students_file():
    rank = (
        "    import minidist\n    minidist.run(lambda group: group.al(), 1, transport='thread')\n"
    )
    late = "    import minidist as m\n    m.run(forever, 1, transport='thread', timeout=0.2)\n\n\n"
    late += "def forever(group):\n    while True:\n        group = group\n"
    called = "    import numpy\n    numpy.linalg.inv([[0]])\n"
    cases = [
        ("    return undefined\n", ["line 2, in gpipe", "return undefined", "NameError: "]),
        (rank, ["rank 0 failed:", "line 3, in gpipe.<locals>.<lambda>", "", "AttributeError: "]),
        (late, ["line 3, in gpipe", "m.run", "CommTimeout", "computes", "in forever", ""]),
        (called, ["line 3, in gpipe", "inv", "numpy/linalg", "numpy/linalg", "LinAlgError"]),
        ("    return (\n", [f'File "{GPIPE}", line 2', "", "", "SyntaxError: "]),
        ("    return list(m)\n", ["line 2, in gpipe", "", "TypeError: "]),
    ]
    order = MODULE, "order", {"schedule": "gpipe", "p": 1, "m": 3}
    with Sandbox(TINY) as sandbox:
        for body, lines in cases:
            wrong = sandbox.put({GPIPE: f"def gpipe(s, p, m):\n{body}"})
            said = (wrong.get(GPIPE) or sandbox.call([order]).answers[0]).splitlines()
            lines_of_numpy = re.compile("    (?!numpy.linalg.inv)")
            said = [line for line in said if not (body is called and lines_of_numpy.match(line))]
            assert len(said) == len(lines), said
            assert all(word in line for word, line in zip(lines, said, strict=True)), said


RIGHT_ANSWER = {"x": [1.0, 2.0], "n": [3, 4], "yes": True, "bytes on rank 0": 3}
RIGHT_ANSWER |= {"bytes on rank 1": 5}


def test_an_answer_is_right_if_it_is_the_packages_up_to_rounding():
    for answer, said in [
        ({"x": [1.0, 2.0 + 1e-12]}, None),
        ({"x": [1, 2]}, None),
        ({"x": [1.0, np.nan]}, "x at [1] is nan, not 2"),
        ({"x": [1.0, 3.0]}, "x at [1] is 3, not 2, 1.5 times as much"),
        ({"x": np.float16([1.0, 2.5])}, "2.5, not 2 (it is float16)"),
        ({"x": ["1", "2"]}, "x is of <U1, not of float64"),
        ({"x": np.zeros(3)}, "x has the shape [3], not [2]"),
        ({"y": 0.0}, "y should not be there"),
        ({"n": [3, 5]}, "n is [3, 5], not [3, 4]"),
        ({"yes": False}, "yes: False, not True"),
        ({"free": np.nan}, None),
        ({"bytes on rank 0": 0, "bytes on rank 1": 8}, None),
        ({"bytes on rank 1": 8}, "bytes sent by all ranks together is 11, not 8, 1.375 times"),
    ]:
        given = {name: np.asarray(value) for name, value in (RIGHT_ANSWER | answer).items()}
        want = {name: np.asarray(value) for name, value in RIGHT_ANSWER.items()}
        message = like_the_package(given, want, free=("free",))
        assert message is None if said is None else said in message, (answer, message)


def test_numbers_that_may_be_smaller_have_the_shape_of_the_packages():
    right = [{"bytes": 3, "peak": 2}, {"bytes": 5, "peak": 4}]
    check([{"bytes": 1, "peak": 1}] * 2, right, at_most=("bytes", "peak"))
    wide, tall = np.zeros((1, 10**5), bool), np.zeros((10**5, 1), bool)  # their sum would be 10 GB
    for name, odd in itertools.product(("bytes", "peak"), (np.zeros(0, int), wide)):
        others = [{"bytes": 1, "peak": 1, name: odd}, {"bytes": 1, "peak": 1, name: tall}]
        with pytest.raises(AssertionError, match=name):
            check(others, right, at_most=("bytes", "peak"))


def test_any_two_arrays_that_the_sandbox_reads_can_be_compared():
    kinds, shapes = "? i1 u8 f8 >f8 g <U3".split(), ((), (2,), (0,), (2, 1))
    arrays = [np.ones(shape, kind) for kind in kinds for shape in shapes]
    arrays += map(np.array, (np.nan, [np.inf, 1.0], 1.7e308, -1.7e308, "nan", "", 2**63))
    for got, want in itertools.product(arrays, repeat=2):
        least = () if want.dtype.kind == "U" else ("x",)
        message = like_the_package({"x on rank 0": got}, {"x on rank 0": want}, at_most=least)
        assert not same({"x": got}, {"x": want}) or message is None, (got, want, message)
        if (got.dtype.kind == "U") != (want.dtype.kind == "U"):
            assert f"is of {got.dtype}, not of {want.dtype}" in message


def test_an_answer_of_another_form_than_the_packages_is_not_looked_at():
    right = [{"x": np.zeros(2), "n": [1, 2]}, {"x": np.ones(2), "n": [3]}]
    check_form([{"x": np.ones(3), "n": [1]}] * 2, right)  # other numbers, of another length
    for answer, why in [
        ([{"x": np.zeros(10_700), "n": [1]}] * 2, "21402 numbers, the package's 7"),
        ([{"x": np.zeros(2), "n": [1]}], "x on rank 1 is missing"),
        ([{"x": np.zeros(2), "n": [1]}] * 3, "x on rank 2 should not be there"),
        ([{"x": None, "n": [1]}] * 2, "x on rank 0 is missing: is it None"),
        ([{"x": 0.0, "n": [1]}] * 2, r"x on rank 0 has the shape \[\], not \[2\]"),
        ([{"x": np.array([np.nan]), "n": [1]}] * 2, "x on rank 0 has a NaN"),
        ([{"x": [10**400], "n": [1]}] * 2, "has too large numbers"),
        (7, "the answer should not be there|is missing"),
    ]:
        with pytest.raises(AssertionError, match=why):
            check_form(answer, right)
    assert in_words(KeyError("x")).endswith("the form that was asked for (KeyError: 'x')")
    assert in_words(AssertionError("two to one\nassert 1 == 2\n  where")) == "two to one"


HOSTILE = "\x1b[2J\x00\ud800\u202e]]></failure>&" + "long " * 200 + "\nline" * 100


def test_reports_are_short_and_plain_and_have_a_score_per_task():
    one, two = TINY.tasks
    wrong = [f"q {i}:\n  {HOSTILE}" for i in range(5)]
    verdicts = [Verdict(one, 5, wrong, HOSTILE, 1.25, ("it is the mean",)), Verdict(two, 3, [])]
    result = Grade(TINY, verdicts, 42, "bubblewrap, limits")
    said = report.text(result)
    assert " 0 / 10  9.1" in said and " 5 /  5  9.2" in said and "q 1: the same" in said
    assert "a known mistake gives these answers: it is the mean" in said
    assert "and 2 more of 5 tests" in said and "q 2" in said and "q 3" not in said
    assert all(line.isprintable() and len(line) < 200 for line in said.splitlines())
    assert len(said.splitlines()) < 80
    found = json.loads(report.gradescope(result))
    assert found.pop("extra_data") == {"seed": 42, "defences": "bubblewrap, limits"}
    assert found["score"] == 5 and "42" not in str(found) and "bubblewrap" not in str(found)
    rows = [(t["number"], t["score"], t["max_score"], t["status"]) for t in found["tests"]]
    assert rows == [("9.1", 0, 10, "failed"), ("9.2", 5, 5, "passed")]
    report.gradescope(result).encode("utf-8")


def test_junit_is_pytests_own_with_points_and_tasks(grades):
    root = ElementTree.fromstring(report.junit(grades["wrong"]))
    (suite,) = root.iter("testsuite")
    assert (suite.get("name"), suite.get("tests")) == ("minidist.lab.tiny", "6")
    failed = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == [f"test_gpipe[{p}]" for p in (1, 2, 3)]
    assert "p 1, schedule gpipe" in failed[0].find("failure").get("message")
    of_suite = {p.get("name"): p.get("value") for p in suite.find("properties")}
    assert of_suite["seed"] == "4" and of_suite["points"] == of_suite["points 9.2"] == "5"
