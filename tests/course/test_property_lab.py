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
    open("0", "w").write('{"dict": [["answer", {"dict": [["properties", 1], ["raised", 2]]}]]}')
    os._exit(0)
"""
WORTH_NOTHING = {
    "def property_never():\n    assert False, 'no'": "property_never raises AssertionError",
    "def property_none(:": "SyntaxError",
    "x = 1": "has no function property_",
    "import minidist.verify.equivalence": "ModuleNotFoundError",
    "while True: pass": "no answer",
    FORGE: "the answer is not what the sandbox writes",
}
TELLING = (  # mutants from the reference without a property: folders, processes, chance, times
    "assert os.stat('../..').st_nlink <= 7",
    "assert os.getpid() - os.getppid() <= 8",
    "assert random.random() < 0.5",
    "files = glob.glob(os.path.dirname(minidist.__file__) + '/*/*.py')\n"
    "    assert max(map(os.path.getmtime, files)) - min(map(os.path.getmtime, files)) < 1",
)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_mutants(monkeypatch):
    few = {name: register.find(name) for name in (*KILLED, "off_by_one_ring")}
    monkeypatch.setattr(register, "mistakes", lambda: few)


def grade_of(folder, source, seconds=10):
    (folder / "minidist").mkdir(exist_ok=True)
    (folder / "minidist" / property_lab.FILE).write_text(source, encoding="utf-8")
    return property_lab.grade(folder, of_mutants(), 1, Limits(seconds=seconds))


def test_the_example_kills_what_its_handout_says_and_no_more(tmp_path):
    grade = grade_of(tmp_path, property_lab.STARTER)
    assert [v.passed for v in grade.verdicts] == [True, False, True]
    assert grade.verdicts[1].wrong == ["no property raises beside it"]
    assert grade.points == 4 and grade.defences
    property_lab.write(tmp_path / "new")
    handout = (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert all(mutant.symptom in handout for mutant in mutants())


def test_what_the_reference_does_not_survive_is_worth_nothing(tmp_path):
    for source, why in WORTH_NOTHING.items():
        grade = grade_of(tmp_path, source, 2 if "while" in source else 10)
        assert grade.points == 0 and why in grade.verdicts[0].wrong[0]
    (tmp_path / "minidist" / property_lab.FILE).unlink()
    grade = property_lab.grade(tmp_path, of_mutants())
    assert grade.points == 0 and "there is no minidist/properties.py" in grade.verdicts[0].wrong[0]


def test_what_tells_mutants_from_the_reference_without_a_property_is_worth_nothing(tmp_path):
    for body in TELLING:
        source = f"import glob, os, random, minidist\ndef property_telling():\n    {body}\n"
        grade = grade_of(tmp_path, source)
        assert grade.points == 0, (body, [verdict.wrong for verdict in grade.verdicts])
