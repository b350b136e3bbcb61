"""What the README files say is so."""

import re
import tomllib
from pathlib import Path

import numpy as np

from minidist import nn
from minidist.cli import COMMANDS, main
from minidist.cli.verify import families, markdown
from minidist.course import mutants
from minidist.course.lab import labs
from minidist.pipeline_parallel import SCHEDULES, read, validate
from minidist.planning.plans.search import ASYNCHRONOUS
from minidist.training.presets import PRESETS
from minidist.verify.mistakes import register

ROOT = Path(__file__).parent.parent


def page(folder=""):
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


def python(text):
    """Return the Python of a page, one string per block."""
    return re.findall(r"```python\n(.*?)^```", text, re.S | re.M)


def test_the_first_two_shell_lines_set_up_train_and_test():
    lines = re.findall(r"^```\n(.*?)^```", page(), re.S | re.M)[0].splitlines()
    setup = 'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/'
    assert lines == [setup + "minidist train", setup + "pytest -n 2 --dist loadfile"]


def test_every_marker_that_chooses_tests_has_a_stage_of_ci():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = configuration["tool"]["pytest"]["ini_options"]["markers"]
    stages = re.findall(r"^ *in_venv .pytest -m (\w+)", (ROOT / ".ci" / "run").read_text(), re.M)
    chosen = {marker.split(":")[0] for marker in markers} - {"gpu", "grid(count)", "task(id)"}
    assert chosen == set(stages)


def test_the_example_runs_and_leaves_the_same_weights_on_every_rank():
    (code,), names = python(page()), {"__name__": "__main__"}
    exec(compile(code, "README.md", "exec"), names)
    weights = names["weights"]
    assert len(weights) == 4
    for name, array in weights[0].items():
        assert all(np.array_equal(array, other[name]) for other in weights[1:])


def test_the_oracle_runs(capsys):
    (code,) = python(page("minidist"))
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 18 and "\n".join(printed[:2]) in page("minidist")
    assert "worker: exact, ok" in printed and not any("FAIL" in line for line in printed)


def test_the_timeline_it_shows_is_what_the_command_prints(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    text = page("minidist/observe/timeline")
    command, shown = re.search(r"^```\n\$ minidist (.*?)\n(.*?)^```", text, re.S | re.M).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown
    monkeypatch.chdir(tmp_path)
    for code in python(text):
        exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "1f1b.svg").stat().st_size > 1000
    assert (tmp_path / "own.csv").read_text().split() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1I0,1I1,1W0,1W1",
    ]
    (own,) = re.findall(r"^```\n(placement.*?)^```", text, re.S | re.M)
    validate(read(own), 2, 2)


def test_the_tables_of_strategies_are_made_from_their_records():
    full = page("minidist/verify/strategies")
    assert f"\n\n{markdown()}\n\n" in full, "paste `minidist strategies --markdown`"
    assert f"\n\n{families()}\n\n" in page(), "paste `minidist strategies --families`"


def test_the_commands_are_those_of_the_help_and_the_presets_those_of_train():
    rows = "".join(f"| `{name}` | {words} |\n" for name, words in COMMANDS.items())
    assert f"| --- | --- |\n{rows}\n" in page("minidist")
    *names, last = (f"`{name}`" for name in PRESETS)
    assert f"lays out the ranks: {', '.join(names)} or {last}." in page("minidist")


def test_the_models_and_schedules_beside_other_codebases_are_all_there_are():
    layers = {name: getattr(nn, name) for name in nn.__all__ if name != "Sequential"}
    kinds = {name: kind for name, kind in layers.items() if isinstance(kind, type)}
    whole = nn.Sequential, nn.Dual, nn.Siamese
    models = [name for name, kind in kinds.items() if issubclass(kind, whole)]
    assert f"| models | {', '.join(models)} |" in page("minidist")
    waits = [name for name in SCHEDULES if name not in ASYNCHRONOUS]
    assert f"| pipelines | {', '.join(waits)}; asynchronous: {', '.join(ASYNCHRONOUS)} |" in page(
        "minidist"
    )


def test_every_lesson_is_in_the_readme():
    for lesson in (ROOT / "lessons").glob("[0-9]*.py"):
        assert f"](lessons/{lesson.name})" in page()
    for other in ("README.md", "minidist/README.md", "lessons/README.md"):
        assert "check_your_own.py)" in (ROOT / other).read_text(encoding="utf-8"), other


def test_every_file_and_page_that_is_named_exists():
    for path in (page for page in ROOT.glob("**/README.md") if ".venv" not in page.parts):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?:minidist|tests|lessons)/[\w/]+\.(?:py|txt)", text):
            assert (ROOT / name).exists(), (path, name)
        for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
            assert link.startswith("https://") or (path.parent / link).exists(), (path, link)


def test_the_numbers_of_labs_tasks_and_mutants_are_those_of_the_course():
    course = page("minidist/course")
    for lab in labs():
        minutes = sum(task.minutes for task in lab.tasks)
        own = [
            m for m in register.mistakes().values() if m.task.partition(".")[0] == str(lab.number)
        ]
        assert f"| `{lab.name}` | {len(lab.tasks)} | {minutes} | {len(own)} |" in course
    assert f"against {len(mutants.names())} wrong implementations" in course


def test_ten_weeks_have_all_labs_with_their_hours_and_the_lessons_of_the_syllabus():
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| ([\d.]+) \|", page("minidist/course"), re.M)
    planned = []
    for _, _, work, hours in rows:
        minutes = 0
        for lab in labs():
            for first, last in re.findall(
                rf"\b{lab.name}\b(?! begins)(?: \d+\.(\d) to \d+\.(\d))?", work
            ):
                tasks = lab.tasks[int(first or 1) - 1 : int(last or len(lab.tasks))]
                minutes += sum(task.minutes for task in tasks)
                planned += [task.id for task in tasks]
        assert abs(float(hours) - minutes / 60) <= 0.25, work
    assert sorted(planned) == sorted(task.id for lab in labs() for task in lab.tasks)
    syllabus = (ROOT / "lessons" / "pages" / "syllabus.md").read_text(encoding="utf-8")
    there = re.findall(r"^\| (\d+) \| (.*?) \|", syllabus, re.M)
    theirs = [(week, re.findall(r"\(\.\./(\d+b?)_\w+\.py\)", lessons)) for week, lessons in there]
    assert theirs == [(week, lessons.split(", ")) for week, lessons, *_ in rows] and len(rows) == 10
