"""The lab in which students write the tests: mutants die, the reference lives."""

import pytest

from minidist.course import property_lab
from minidist.course.lab import mutants, of_mutants
from minidist.course.sandbox.limits import Limits
from minidist.verify.mistakes import register

KILLED = ["no_all_reduce", "weights_averaged"]  # by the example that is handed out


FORGE = """
import os
def property_forge():
    open("0", "w").write('{{"dict": [["answer", {}]]}}')
    os._exit(0)
"""


@pytest.fixture
def few_mutants(monkeypatch):
    few = {name: register.find(name) for name in (*KILLED, "off_by_one_ring")}
    monkeypatch.setattr(register, "mistakes", lambda: few)


def points_of(folder, source, seed=0):
    (folder / "minidist").mkdir()
    (folder / "minidist" / property_lab.FILE).write_text(source, encoding="utf-8")
    return property_lab.grade(folder, of_mutants(), seed, Limits(seconds=10))


@pytest.mark.usefixtures("few_mutants")
def test_the_example_kills_what_its_handout_says_and_no_more(tmp_path):
    grade = points_of(tmp_path, property_lab.STARTER)
    assert [v.passed for v in grade.verdicts] == [True, False, True]
    assert grade.verdicts[1].wrong == ["no property raises beside it"]
    assert grade.points == 4 and grade.defences


@pytest.mark.usefixtures("few_mutants")
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def property_never():\n    assert False, 'no'", "property_never raises AssertionError"),
        ("def property_none(:", "SyntaxError"),
        ("x = 1", "has no function property_"),
        ("import minidist.verify.equivalence", "ModuleNotFoundError"),
        ("while True: pass", "no answer"),
        *(
            (FORGE.format(answer), "the answer is not what the sandbox writes")
            for answer in (
                "[]",
                '{"dict": [["properties", 1], ["raised", {"dict": []}]]}',
                '{"dict": [["properties", ["a"]], ["raised", {"dict": [["b", ""]]}]]}',
            )
        ),
    ],
    ids="kills_the_reference syntax nothing tools endless forged_nothing "
    "forged_numbers forged_lengths".split(),
)
def test_what_the_reference_does_not_survive_is_worth_nothing(tmp_path, source, why):
    (tmp_path / "minidist").mkdir()
    (tmp_path / "minidist" / property_lab.FILE).write_text(source, encoding="utf-8")
    grade = property_lab.grade(tmp_path, of_mutants(), limits=Limits(seconds=2))
    assert grade.points == 0 and why in grade.verdicts[0].wrong[0]


TELLING = {
    "how_many_trees_there_are": """
import os
def property_count():
    assert os.stat("../..").st_nlink <= 7
""",
    "how_many_processes_there_were": """
import os
def property_number():
    assert os.getpid() - os.getppid() <= 8
""",
    "chance": """
import random
def property_chance():
    assert random.random() < 0.5
""",
    "times_of_change": """
import glob, os, minidist
def property_times():
    files = glob.glob(os.path.dirname(minidist.__file__) + "/*/*.py")
    assert max(map(os.path.getmtime, files)) - min(map(os.path.getmtime, files)) < 1
""",
}


@pytest.mark.usefixtures("few_mutants")
@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[pytest.mark.slow] if at else []) for at, how in enumerate(TELLING)],
)
def test_what_tells_mutants_from_the_reference_without_a_property_is_worth_nothing(tmp_path, how):
    grade = points_of(tmp_path, TELLING[how], seed=1)
    assert grade.points == 0, [verdict.wrong for verdict in grade.verdicts]


def test_without_the_file_there_are_no_points_and_the_handout_names_every_mutant(tmp_path):
    (tmp_path / "minidist").mkdir()
    grade = property_lab.grade(tmp_path, of_mutants())
    assert grade.points == 0 and "there is no minidist/properties.py" in grade.verdicts[0].wrong[0]
    property_lab.write(tmp_path / "new")
    handout = (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert all(mutant.symptom in handout for mutant in mutants())
