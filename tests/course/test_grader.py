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
from minidist.course.answers import check, check_form, flat, like_the_package
from minidist.course.diagnosis import same
from minidist.course.grader import Grade, Verdict, grade, handed_in, untouched
from minidist.course.grading import in_words
from minidist.course.sandbox import Sandbox
from minidist.course.sandbox.limits import Limits
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.tiny import GPIPE, MODULE, OTHER, TINY

pytestmark = pytest.mark.timeout(600)  # the first test waits for all that is graded
RIGHT = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in (GPIPE, OTHER)}


def folder(tmp_path, files):
    for path, source in files.items():
        place = tmp_path / "minidist" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source, encoding="utf-8")
    (tmp_path / "minidist").mkdir(exist_ok=True)
    return tmp_path


def points(result):
    return [verdict.points for verdict in result.verdicts]


FILL = "yield from map(Forward, range(m))"
SHORT = 'print("filled", __file__)\nyield from map(Forward, range(m - 1))'
WRONG = Edit(f"{GPIPE}:gpipe", SHORT, FILL).apply(RIGHT[GPIPE])
DEADLOCK = """from minidist.errors import Deadlock


def gpipe(rank, p, m):
    return Late()


class Late:
    def __iter__(self):
        raise Deadlock('all wait')
"""
HANDED_IN = {
    "reference": RIGHT,
    "starter": TINY.blanked(),
    "one task": {OTHER: RIGHT[OTHER]},
    "wrong": RIGHT | {GPIPE: WRONG},
    "no Python": RIGHT | {GPIPE: "def gpipe(rank)\n"},
    "a late error": RIGHT | {GPIPE: DEADLOCK},
    "endless": RIGHT | {GPIPE: "def gpipe(s, p, m):\n    while True:\n        m += 1\n"},
}
OPTIONS = {"wrong": {"seed": 4}, "endless": {"limits": Limits(3)}}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Return {what is handed in: its grade}."""
    return {
        name: grade(folder(tmp_path_factory.mktemp("a"), files), TINY, **OPTIONS.get(name, {}))
        for name, files in HANDED_IN.items()
    }


def test_the_reference_has_full_marks_and_the_starter_none(graded):
    assert points(graded["reference"]) == [10, 5]
    starter = graded["starter"]
    assert points(starter) == [0, 0]
    assert not any(verdict.begun for verdict in starter.verdicts)
    lines = report.text(starter).splitlines()
    assert [line.endswith("(not begun)") for line in lines[2:5]] == [True, True, False]


def test_a_task_is_begun_when_one_of_its_bodies_is_not_the_starters(tmp_path):
    begun = TINY.blanked()[GPIPE].replace("raise Not", "m += 1\n    raise  Not")
    one, other = grade(folder(tmp_path, {GPIPE: begun, OTHER: RIGHT[OTHER]}), TINY).verdicts
    assert other.passed and one.begun
    assert all("NotImplementedError: Task 9.1" in text for text in one.wrong)


def test_a_task_in_two_files_is_begun_when_one_of_them_is_not_the_starters():
    both = replace(TINY.tasks[0], blanks=[f"{GPIPE}: gpipe", f"{OTHER}: one_f_one_b"])
    files = replace(TINY, tasks=[both]).blanked()
    assert untouched(both, files)
    assert not untouched(both, files | {OTHER: RIGHT[OTHER]})
    assert not untouched(both, {GPIPE: files[GPIPE]}), "a file is missing"


def test_one_task_alone_is_asked_and_reported(tmp_path):
    result = grade(folder(tmp_path, RIGHT), TINY, task="9.2")
    assert [verdict.task.id for verdict in result.verdicts] == ["9.2"]
    assert result.points == result.lab.points == 5
    with pytest.raises(ValueError, match=r"lab tiny has no task '9\.3'; it has 9\.1, 9\.2"):
        grade(tmp_path, TINY, task="9.3")


def arrays():
    """Yield an array of every kind and shape that the sandbox reads, and extreme values."""
    for kind in "? i1 u8 f2 f8 >f8 g <U3 >U2".split():
        for shape in ((), (2,), (0,), (2, 1)):
            yield from (np.zeros(shape, kind), np.ones(shape, kind))
    yield from map(np.array, (np.nan, [np.inf, 1.0], 1.7e308, -1.7e308, "nan", "", 2**63))


def test_an_answer_of_any_kind_is_compared_with_any_other():
    for got, want in itertools.product(arrays(), repeat=2):
        names = ("x on rank 0", *([] if want.dtype.kind == "U" else ["bytes on rank 0"]))
        answer, right = dict.fromkeys(names, got), dict.fromkeys(names, want)
        alike = same(answer, right)
        message = like_the_package(answer, right, at_most=names[1:] and ("x",))
        assert alike in (True, False) and (not alike or message is None), (got, want, message)
        if (got.dtype.kind == "U") != (want.dtype.kind == "U"):
            assert not alike and f"is of {got.dtype}, not of {want.dtype}" in message


def test_a_group_of_questions_earns_its_share_of_the_points():
    task = TINY.tasks[0]
    for answered, points in (({"a": True, "b": False, "c": True}, 7), ({"a": False}, 0)):
        assert Verdict(task, 9, ["wrong"], groups=answered).points == points
    assert Verdict(task, 9, []).points == 10
    half = Verdict(task, 9, ["no"], groups={"a": True, "b": False})
    said = report.text(Grade(TINY, [half], 0, ""))
    assert " 5 / 10" in said and "answered: a (5); not yet: b (5)" in said


def test_a_task_alone_earns_its_points_and_a_missing_file_is_the_starters(graded):
    result = graded["one task"]
    assert points(result) == [0, 5] and result.points == 5
    assert result.verdicts[0].wrong == [f"there is no minidist/{GPIPE}"]


def test_a_wrong_answer_says_what_is_wrong_and_what_was_printed(graded):
    result = graded["wrong"]
    said = report.text(result)
    assert points(result) == [0, 5]
    assert result.verdicts[0].output.startswith(f"filled minidist/{GPIPE}\n")
    line = r"p 1, schedule gpipe, m \d: the program on rank 0 is \['F0', .*\], not \['F0'"
    assert re.search(line, said)
    assert " 5 / 15  points" in said and "seed: 4" in said


def test_a_seed_gives_the_same_questions_again(tmp_path, graded):
    again, other = (grade(folder(tmp_path, HANDED_IN["wrong"]), TINY, seed) for seed in (4, 5))
    wrong = [
        [verdict.wrong for verdict in each.verdicts] for each in (graded["wrong"], again, other)
    ]
    assert wrong[0] == wrong[1] != wrong[2]
    assert graded["reference"].seed != graded["starter"].seed


def test_a_folder_without_minidist_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        grade(tmp_path / "missing", TINY)
    with pytest.raises(ValueError, match="has no folder minidist; hand in minidist/pipeline"):
        grade(tmp_path, TINY)
    folder(tmp_path / "one", RIGHT), folder(tmp_path / "two", RIGHT)
    with pytest.raises(ValueError, match="has no folder minidist"):
        grade(tmp_path, TINY)


def test_one_folder_around_what_is_handed_in_is_looked_into(tmp_path):
    folder(tmp_path / "there" / "mine", RIGHT)
    folder(tmp_path / "there" / "__MACOSX", {GPIPE: "resource fork"})
    assert handed_in(tmp_path / "there", [GPIPE, OTHER]) == (RIGHT, {})
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "mine").symlink_to(PACKAGE.parent)
    with pytest.raises(ValueError, match="has no folder minidist"):
        handed_in(tmp_path / "link", [GPIPE])


def test_only_regular_files_within_the_folder_are_taken(tmp_path):
    theirs = folder(tmp_path / "theirs", RIGHT)
    files = [GPIPE, OTHER]
    assert handed_in(theirs, files) == (RIGHT, {})
    for path in files:
        (theirs / "minidist" / path).unlink()
    assert handed_in(theirs, files) == ({}, {})
    (theirs / "minidist" / GPIPE).symlink_to(PACKAGE / GPIPE)
    os.mkfifo(theirs / "minidist" / OTHER)
    found, why = handed_in(theirs, files)
    assert found == {} and "leads out of the folder" in why[GPIPE]
    assert "not a regular file" in why[OTHER]
    (theirs / "minidist" / OTHER).unlink()
    (theirs / "minidist" / OTHER).mkdir()
    assert "not a regular file" in handed_in(theirs, files)[1][OTHER]
    (theirs / "minidist" / OTHER).rmdir()
    (theirs / "minidist" / OTHER).write_bytes(b"#" * ((1 << 20) + 1))
    assert "more than 1048576 bytes" in handed_in(theirs, files)[1][OTHER]
    (theirs / "minidist" / OTHER).unlink()
    (theirs / "minidist" / OTHER).symlink_to(theirs / "minidist" / OTHER)
    assert OTHER in handed_in(theirs, files)[1]


def test_a_folder_that_is_a_link_to_the_package_is_not_taken(tmp_path):
    (tmp_path / "minidist").symlink_to(PACKAGE)
    found, why = handed_in(tmp_path, [GPIPE, OTHER])
    assert found == {} and why.keys() == {GPIPE, OTHER}


def test_what_is_said_of_an_error_has_no_lines_but_the_packages(graded):
    for name, words in ("no Python", "SyntaxError"), ("a late error", "Deadlock: all wait"):
        lines = graded[name].verdicts[0].wrong[0].splitlines()
        assert all(line.strip() for line in lines) and words in lines[-1]
        assert "frozen" not in str(lines) and "minidist-lab-" not in str(lines)


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
        sandbox.put({})
        (starter,) = sandbox.call([order]).answers
    assert re.search(rf"^{GPIPE}, line \d+, in gpipe\nNotImplementedError: Task 9", starter)


def test_an_endless_loop_is_shown_where_it_is(graded):
    first, *others = graded["endless"].verdicts[0].wrong
    assert re.search(rf"stopped after 3 s; .*\n +{GPIPE}, line [23], in gpipe\n", first), first
    assert all("not asked any more" in other for other in others)


def test_a_file_that_is_no_python_costs_the_tasks_in_it_alone(graded):
    assert points(graded["no Python"]) == [0, 5]
    assert graded["no Python"].verdicts[0].wrong[0].startswith(f"{GPIPE}:")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
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
    ],
)
def test_an_answer_is_right_if_it_is_the_packages_up_to_rounding(answer, said):
    right = {"x": [1.0, 2.0], "n": [3, 4], "yes": True, "bytes on rank 0": 3, "bytes on rank 1": 5}
    given = {name: np.asarray(value) for name, value in (right | answer).items()}
    if said is None:
        return check(given, right, free=("free",))
    with pytest.raises(AssertionError, match=re.escape(said)):
        check(given, right, free=("free",))


def test_numbers_that_may_be_smaller_have_the_shape_of_the_packages():
    right = [{"bytes": 3, "peak": 2}, {"bytes": 5, "peak": 4}]
    check([{"bytes": 1, "peak": 1}] * 2, right, at_most=("bytes", "peak"))
    wide, tall = np.zeros((1, 10**5), bool), np.zeros((10**5, 1), bool)  # their sum would be 10 GB
    for name in ("bytes", "peak"):
        for odd in (np.zeros(0, int), wide):
            others = [{"bytes": 1, "peak": 1, name: odd}, {"bytes": 1, "peak": 1, name: tall}]
            with pytest.raises(AssertionError, match=name):
                check(others, right, at_most=("bytes", "peak"))


def test_an_answer_of_another_form_than_the_packages_is_not_looked_at():
    right = [{"x": np.zeros(2), "n": [1, 2]}, {"x": np.ones(2), "n": [3]}]
    check_form([{"x": np.ones(3), "n": [1]}] * 2, right)  # other numbers, of another length
    for answer, why in [
        ([{"x": np.zeros(10_700), "n": [1]}] * 2, "21402 numbers, the package's 7"),
        ([{"x": np.zeros(2), "n": [1]}], "x on rank 1 is missing"),
        ([{"x": np.zeros(2), "n": [1]}] * 3, "x on rank 2 should not be there"),
        ([{"x": None, "n": [1]}] * 2, "x on rank 0 is missing: is it None"),
        ([{"x": "zero", "n": [1]}] * 2, "x on rank 0 is of <U4, not of float64"),
        ([{"x": 0.0, "n": [1]}] * 2, r"x on rank 0 has the shape \[\], not \[2\]"),
        ([{"x": np.array([np.nan]), "n": [1]}] * 2, "x on rank 0 has a NaN"),
        ([{"x": [10**400], "n": [1]}] * 2, "has too large numbers"),
        (7, "the answer should not be there|is missing"),
    ]:
        with pytest.raises(AssertionError, match=why):
            check_form(answer, right)
    assert flat([[1, 2], [[1.5], "a"]]).keys() == {
        "the answer on rank 0",
        "the answer 0 on rank 1",
        "the answer 1 on rank 1",
    }


def test_an_answer_that_a_test_stumbles_over_is_wrong():
    assert in_words(KeyError("x")).endswith("the form that was asked for (KeyError: 'x')")
    assert in_words(AssertionError("two to one\nassert 1 == 2\n  where")) == "two to one"
    assert in_words(AssertionError("assert 1 == 2")) == "assert 1 == 2"
    assert in_words(AssertionError()) == "it is wrong"


HOSTILE = "\x1b[2J\x00\ud800\u202e]]></failure>&" + "long " * 200 + "\nline" * 100


@pytest.fixture
def result():
    one, two = TINY.tasks
    verdicts = [
        Verdict(
            one, 5, [f"q {i}:\n  {HOSTILE}" for i in range(5)], HOSTILE, 1.25, ("it is the mean",)
        )
    ]
    return Grade(TINY, [*verdicts, Verdict(two, 3, [], "", 0.5)], 42, "bubblewrap, limits")


def test_the_text_is_short_and_plain(result):
    said = report.text(result)
    assert " 0 / 10  9.1" in said and " 5 /  5  9.2" in said and " 5 / 15  points" in said
    assert "defences: bubblewrap, limits" in said and "q 1: the same" in said
    assert "a known mistake gives these answers: it is the mean" in said
    assert "and 2 more of 5 questions" in said and "q 2" in said and "q 3" not in said
    assert all(line.isprintable() and len(line) < 200 for line in said.splitlines())
    assert len(said.splitlines()) < 80


def test_junit_is_pytests_own_with_points_and_tasks(graded):
    root = ElementTree.fromstring(report.junit(graded["wrong"]))
    (suite,) = root.iter("testsuite")
    assert (suite.get("name"), suite.get("tests")) == ("minidist.lab.tiny", "6")
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None]
    assert suite.get("failures") == "3" and [case.get("name") for case in failed] == [
        f"test_gpipe[{p}]" for p in (1, 2, 3)
    ]
    assert "p 1, schedule gpipe" in failed[0].find("failure").get("message")
    tasks = [case.find("properties/property").get("value") for case in cases]
    assert tasks == ["9.1"] * 3 + ["9.2"] * 3
    of_suite = {p.get("name"): p.get("value") for p in suite.find("properties")}
    assert of_suite["seed"] == "4" and of_suite["points"] == of_suite["points 9.2"] == "5"


def test_gradescope_has_a_score_per_task(result):
    found = json.loads(report.gradescope(result))
    assert found["score"] == 5 and found["execution_time"] == 2
    assert found.pop("extra_data") == {"seed": 42, "defences": "bubblewrap, limits"}
    assert "42" not in str(found) and "bubblewrap" not in str(found)
    assert [(t["number"], t["score"], t["max_score"], t["status"]) for t in found["tests"]] == [
        ("9.1", 0, 10, "failed"),
        ("9.2", 5, 5, "passed"),
    ]
    assert all(t["visibility"] == "visible" and "output" in t for t in found["tests"])
    report.gradescope(result).encode("utf-8")


def test_the_cause_of_an_endless_loop_is_that_it_was_stopped_and_where():
    wrong = "p = 2:\n    no answer: stopped after 9 s; shortly before it was at\n  a.py:3\n    pass"
    assert report.cause(Verdict(TINY.tasks[0], 1, [wrong])) == "no answer: stopped after 9 s: pass"
    assert report.cause(Verdict(TINY.tasks[0], 1, ["p = 2: x is 1"])) == "p = 2: x is 1"
