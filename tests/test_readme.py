"""What the README says is so."""

import re
from pathlib import Path

import numpy as np

from minidist.cli import main
from minidist.course import zoo
from minidist.course.lab import labs
from minidist.tools.equivalence import strategies

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_two_shell_lines_set_up_train_and_test():
    lines = re.findall(r"^```\n(.*?)^```", README, re.S | re.M)[0].splitlines()
    setup = 'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/'
    assert lines == [setup + "minidist train", setup + "pytest -n 2 --dist loadfile"]


def test_the_example_runs_and_leaves_the_same_weights_on_every_rank():
    code = re.search(r"```python\n(import numpy.*?)^```", README, re.S | re.M).group(1)
    names = {"__name__": "__main__"}
    exec(compile(code, "README.md", "exec"), names)
    weights = names["weights"]
    assert len(weights) == 4
    for name, array in weights[0].items():
        assert all(np.array_equal(array, other[name]) for other in weights[1:])


def test_the_oracle_runs(capsys):
    code = re.search(
        r"```python\n(import numpy as np\nfrom minidist import nn\n.*?)^```", README, re.S | re.M
    )
    exec(compile(code.group(1), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "True\n"


def test_the_timeline_it_shows_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command, shown = re.search(r"^```\n\$ minidist (.*?)\n(.*?)^```", README, re.S | re.M).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_every_file_it_names_exists_and_every_strategy_has_a_row():
    for path in re.findall(r"(?:minidist|tests|lessons)/[\w/]+\.(?:py|txt)", README):
        assert (ROOT / path).exists(), path
    for name in strategies():
        assert f"| `{name}`" in README
    for lesson in (ROOT / "lessons").glob("*.py"):
        assert f"lessons/{lesson.name}" in README


def test_its_numbers_of_labs_tasks_and_mutants_are_those_of_the_course():
    for lab in labs():
        assert f"| `{lab.name}` | {len(lab.tasks)} |" in README and lab.points == 100
    assert f"against {len(zoo.names())} wrong implementations" in README
