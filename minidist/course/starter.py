"""What a student begins with: a lab's files with the tasks' bodies removed, and a README."""

import textwrap
from pathlib import Path

from minidist.course.lab import Lab, Task
from minidist.course.submissions import LABEL
from minidist.errors import WrongInput, plural


def write(lab: Lab, folder: Path) -> list[str]:
    """Write the starter of a lab into a new or empty folder; return the paths of its files.

    ValueError if the folder is not empty, or cannot be made.
    """
    files = {
        "README.md": handout(lab),
        LABEL: f"{lab.name}\n{lab.student}".rstrip() + "\n",
        **{f"minidist/{path}": map_of(lab, path) + s for path, s in lab.blanked().items()},
    }
    return write_files(folder, files)


def write_files(folder: Path, files: dict[str, str]) -> list[str]:
    """Write text files into a new or empty folder; ValueError if it is neither."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise WrongInput(f"{folder} is not empty; choose a new folder")
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WrongInput(f"cannot write into {folder}: {error.strerror}") from None
    return list(files)


def map_of(lab: Lab, path: str) -> str:
    """Return the comment at the head of a file: what is to be written there."""
    lines = [f"Lab {lab.number}, {lab.title}. Yours in this file, in this order:"]
    here = [(task, [n for where, n in task.targets if where == path]) for task in lab.tasks]
    here = [(task, names) for task, names in here if names]
    for task, names in here:
        lines.append(f"  {task.id}  {task.title}, {task.minutes} minutes: {', '.join(names)}")
        lines += [f"       yours: {task.variant.says}"] if task.variant else []
    lines += [f"Read before: {', '.join(f'lessons/{lesson}.py' for lesson in lab.lessons)}."]
    lines += ["README.md, in the folder above minidist, has each task's text, numbers and hints."]
    lines += [f"While you write: minidist lab test . --task {here[0][0].id} --watch"]
    short = [part for line in lines for part in textwrap.wrap(line, 98, subsequent_indent=" " * 7)]
    return "".join(f"# {line}\n" for line in short) + "\n"


def handout(lab: Lab) -> str:
    """Return the README of a starter."""
    write = "\n".join(f"- `minidist/{path}`" for path in lab.files)
    read = ", ".join(f"`lessons/{lesson}.py`" for lesson in lab.lessons)
    minutes = sum(task.minutes for task in lab.tasks)
    return f"""# Lab {lab.number}: {lab.title}

{lab.about}

Read before: {read}.

## What to do

{plural(len(lab.tasks), "task")}, about {minutes} minutes, {lab.points} points. Replace each
`raise NotImplementedError("Task ...")` in

{write}

and hand in these files, in these folders, and `{LABEL}`. Nothing else is used; all the rest of
minidist, including the solutions of earlier labs, comes from the package.

One command tests all tasks, from this folder; the other one a single task, again whenever you save:

```
minidist lab test .
minidist lab test . --task {lab.number}.1 --watch
```

The tests of a task are in groups, such as one or two ranks, and any number of them. A group earns
its share of the points if all its tests pass within the time limit; the grader runs the same tests
with other numbers.

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
    """Return the functions to write, by file: "`A.f`, `g` in `minidist/a.py`"."""
    names: dict[str, list[str]] = {}
    for path, name in task.targets:
        names.setdefault(path, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(here)} in `minidist/{path}`" for path, here in names.items())
