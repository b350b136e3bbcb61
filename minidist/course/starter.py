"""What a student begins with: a lab's files with the tasks' bodies removed, and its tests."""

import re
import textwrap
from pathlib import Path

from minidist.course.lab import Lab, Task
from minidist.course.sandbox import module
from minidist.course.sandbox.untrusted import contents, holder
from minidist.mistakes.overlay import PACKAGE

NAME = "lab.txt"  # the lab's name, for `minidist lab test` and `grade`

IMPORT = r"^from (minidist[.\w]*) import (\([^)]*\)|.*)"

TESTS = '''"""The public tests of this lab: `minidist lab test .` or `pytest`, here.

A question is asked in a separate process, whose `minidist` contains your files, and is judged in
this one. See questions.py and probes.py in minidist/course/labs/{name} of the installed minidist
for what is asked and how it is judged.
"""

from pathlib import Path

import pytest

from minidist.course.grader import handed_in, questions
from minidist.course.lab import find
from minidist.course.question import judge
from minidist.course.sandbox import Sandbox

LAB = find("{name}")
ASKED = [
    pytest.param(question, id=f"{{task.id}}: {{question.about}}")
    for task in LAB.tasks
    for question in questions(LAB, task, seed=0)
]


@pytest.fixture(scope="session")
def student(request):
    files, unusable = handed_in(Path(request.config.option.impl), LAB.files)
    with Sandbox(LAB) as sandbox:
        unusable |= sandbox.put(files)
        assert not unusable, unusable
        yield sandbox


@pytest.mark.parametrize("question", ASKED)
def test_task(student, question):
    [answer] = student.ask([question]).answers
    if wrong := judge(question, answer):
        pytest.fail(wrong, pytrace=False)
'''

CONFTEST = '''"""`--impl=DIR` tests another folder than this one."""

import contextlib
from pathlib import Path


def pytest_addoption(parser):
    with contextlib.suppress(ValueError):  # the tests of minidist itself have it too
        parser.addoption("--impl", metavar="DIR", default=str(Path(__file__).parents[1]))
'''


def write(lab: Lab, folder: Path) -> list[str]:
    """Write the starter of a lab into a new or empty folder; return the paths of its files.

    ValueError if the folder is not empty, or cannot be made.
    """
    files = {
        "README.md": handout(lab),
        NAME: f"{lab.name}\n",
        "tests/conftest.py": CONFTEST,
        f"tests/test_{lab.name}.py": TESTS.format(name=lab.name),
        **{f"minidist/{path}": map_of(lab, path) + s for path, s in lab.blanked().items()},
    }
    return write_files(folder, files)


def write_files(folder: Path, files: dict[str, str]) -> list[str]:
    """Write text files into a new or empty folder; ValueError if it is neither."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; choose a new folder")
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}") from None
    return list(files)


def lab_name(folder: Path) -> str:
    """Return the name of a folder's lab, from its lab.txt.

    The file may also be in the only subfolder that has one, as in zipped folders.
    """
    root = holder(folder, NAME, Path.is_file)
    found = contents(root / NAME, 100) if root else None  # it is handed in: perhaps a link
    if found is None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        raise ValueError(f"{folder} has no {NAME}, which names its lab; pass the name: --lab NAME")
    return found.decode("utf-8-sig", "replace").strip()


def map_of(lab: Lab, path: str) -> str:
    """Return the comment at the head of a file: what is to be written there, and who calls it."""
    lines = [f"Lab {lab.number}, {lab.title}. Yours in this file, in this order:"]
    here = [(task, [n for where, n in task.targets if where == path]) for task in lab.tasks]
    here = [(task, names) for task, names in here if names]
    for task, names in here:
        lines.append(f"  {task.id}  {task.title}, {task.minutes} minutes: {', '.join(names)}")
        callers = files_that_use(path, {name.partition(".")[0] for name in names})
        more = f" and {len(callers) - 3} more" if len(callers) > 3 else ""
        if callers and (used := f"       used by {', '.join(callers[:3])}{more}") not in lines:
            lines.append(used)
    lines += [f"Read before: {', '.join(f'lessons/{lesson}.py' for lesson in lab.lessons)}."]
    lines += ["README.md, in the folder above minidist, has each task's text, numbers and hints."]
    lines += [f"While you write: minidist lab test . --task {here[0][0].id} --watch"]
    short = [part for line in lines for part in textwrap.wrap(line, 98, subsequent_indent=" " * 7)]
    return "".join(f"# {line}\n" for line in short) + "\n"


def files_that_use(path: str, names: set[str]) -> list[str]:
    """Return the files of the package that import one of a file's names, or the file for it."""
    whole = module(path)
    stem, found = whole.rpartition(".")[2], []
    for file in sorted(PACKAGE.rglob("*.py")):
        text, place = file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).as_posix()
        if place.startswith(("course/", "pages/")) or file.name == "__init__.py":
            continue
        for source, imported in re.findall(IMPORT, text, re.MULTILINE):
            words = set(re.findall(r"\w+", imported))
            through = stem in words and any(f"{stem}.{name}" in text for name in names)
            if f"{whole}.".startswith(f"{source}.") and (words & names or through):
                found.append(place)
    return list(dict.fromkeys(found))


def handout(lab: Lab) -> str:
    """Return the README of a starter."""
    write = "\n".join(f"- `minidist/{path}`" for path in lab.files)
    read = ", ".join(f"`lessons/{lesson}.py`" for lesson in lab.lessons)
    minutes = sum(task.minutes for task in lab.tasks)
    return f"""# Lab {lab.number}: {lab.title}

{lab.about}

Read before: {read}.

## What to do

{len(lab.tasks)} tasks, about {minutes} minutes, {lab.points} points. Replace each
`raise NotImplementedError("Task ...")` in

{write}

and hand in these files, in these folders. Nothing else is used; all the rest of minidist, including
the solutions of earlier labs, comes from the package.

One command tests all tasks, from this folder; the other one a single task, again whenever you save:

```
minidist lab test .
minidist lab test . --task {lab.number}.1 --watch
```

`pytest` does the same, question by question (`pytest -k {lab.number}.1 -x`). The questions of a
task are in groups, such as one or two ranks, and any number of them. A group earns its share of the
points if all its questions are answered correctly within the time limit; the grader asks the same
questions with other numbers.

{chr(10).join(_task(task) for task in lab.tasks)}{_written(lab)}"""


def _task(task: Task) -> str:
    numbers = "".join(f"- {number}\n" for number in task.numbers)
    hints = "\n".join(
        f"<details><summary>Hint {number}</summary>\n\n{hint.strip()}\n\n</details>\n"
        for number, hint in enumerate(task.hints, 1)
    )
    effort = f"{task.minutes} minutes, difficulty {task.difficulty} of 3, {task.points} points"
    return f"""## Task {task.id}: {task.title}

Write {to_write(task)}. {effort}.

{task.text}

Numbers to hit:

{numbers}
{hints}"""


def _written(lab: Lab) -> str:
    if not lab.written:
        return ""
    lines = [f"{number}. {essay.question}" for number, essay in enumerate(lab.written, 1)]
    head = "## Written questions\n\nThey are read by a teacher, and are not in the points above."
    return "\n".join(["", head, "", *lines, ""])


def to_write(task: Task) -> str:
    """Return what to write in which file: "`A.f`, `g` in `minidist/a.py`"."""
    names: dict[str, list[str]] = {}
    for path, name in task.targets:
        names.setdefault(path, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(here)} in `minidist/{path}`" for path, here in names.items())
