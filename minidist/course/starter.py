"""What a student begins with: a lab's files with the tasks' bodies removed, and its tests."""

from pathlib import Path

from minidist.course.lab import Lab, Task, targets
from minidist.course.sandbox.untrusted import contents, holder

NAME = "lab.txt"  # the lab's name, for `minidist lab test` and `grade`

TESTS = '''"""The public tests of this lab: `minidist lab test .` or `pytest`, here.

A question is asked in a separate process, whose `minidist` contains your files, and is judged in
this one. See minidist/course/questions/{name}.py and probes/{name}.py of the installed minidist
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
        **{f"minidist/{path}": source for path, source in lab.blanked().items()},
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


def handout(lab: Lab) -> str:
    """Return the README of a starter."""
    write = "\n".join(f"- `minidist/{path}`" for path in lab.files)
    read = ", ".join(f"`lessons/{lesson}.py`" for lesson in lab.lessons)
    return f"""# Lab {lab.number}: {lab.title}

{lab.about.strip()}

Read before: {read}.

## What to do

{len(lab.tasks)} tasks, {lab.points} points. Replace each `raise NotImplementedError("Task ...")` in

{write}

and hand in these files, in these folders. Nothing else is used; all the rest of minidist, including
the solutions of earlier labs, comes from the package.

One command tests all tasks, from this folder:

```
minidist lab test .
```

`pytest` does the same, question by question (`pytest -k {lab.number}.1 -x`). A task earns points
if all its questions are answered correctly within the time limit; the grader asks the same
questions with other numbers.

{chr(10).join(_task(task) for task in lab.tasks)}"""


def _task(task: Task) -> str:
    numbers = "".join(f"- {number}\n" for number in task.numbers)
    hints = "\n".join(
        f"<details><summary>Hint {number}</summary>\n\n{hint.strip()}\n\n</details>\n"
        for number, hint in enumerate(task.hints, 1)
    )
    return f"""## Task {task.id}: {task.title} ({task.points} points)

Write {written(task)}.

{task.text.strip()}

Numbers to hit:

{numbers}
{hints}"""


def written(task: Task) -> str:
    """Return what to write in which file: "`A.f`, `g` in `minidist/a.py`"."""
    names: dict[str, list[str]] = {}
    for path, name in targets(task):
        names.setdefault(path, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(here)} in `minidist/{path}`" for path, here in names.items())
