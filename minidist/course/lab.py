"""A lab: its tasks, their points, and which functions of minidist each of them blanks out.

A lab is a TOML file in `labs/`. The grader asks its questions (`questions/`). Its probes
(`probes/`) put them to a student's code, in a sandbox, and to the package, whose answers are right.
"""

import tomllib
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

from minidist.course.blank import blank
from minidist.mistakes.overlay import PACKAGE

LABS = Path(__file__).parent / "labs"


@dataclass(frozen=True)
class Task:
    """One thing to write.

    id       "4.2": the second task of lab 4
    blanks   what to write: "pipeline_parallel/gpipe.py:gpipe", "comm/mesh.py:Mesh.rank_of"
    text     what is asked, in Markdown
    numbers  what the grader measures and compares with a closed form
    hints    to be opened one by one
    """

    id: str
    title: str
    points: int
    blanks: list[str]
    text: str
    numbers: list[str]
    hints: list[str]


@dataclass(frozen=True)
class Lab:
    """Some tasks around one idea.

    about    what it is about, in Markdown
    lessons  what to read before
    """

    name: str
    number: int
    title: str
    about: str
    lessons: list[str]
    tasks: list[Task]

    points = property(lambda self: sum(task.points for task in self.tasks))

    @property
    def files(self) -> list[str]:
        """The files to hand in, as paths in the package."""
        return sorted({path for task in self.tasks for path, _ in targets(task)})

    def blanked(self) -> dict[str, str]:
        """Return {path in the package: source} with the body of every task taken out."""
        bodies: dict[str, dict[str, str]] = {path: {} for path in self.files}
        for task in self.tasks:
            for path, function in targets(task):
                bodies[path][function] = f"Task {task.id}: {task.title}"
        return {
            path: blank((PACKAGE / path).read_text(encoding="utf-8"), functions)
            for path, functions in bodies.items()
        }

    @property
    def questions(self) -> ModuleType:
        return import_module(f"minidist.course.questions.{self.name}")

    @property
    def probes(self) -> Path:
        return Path(__file__).parent / "probes" / f"{self.name}.py"


def targets(task: Task) -> list[tuple[str, str]]:
    """Return (path in the package, qualified name) of what a task blanks out."""
    split = [entry.partition(":") for entry in task.blanks]
    return [(path, name) for path, _, name in split]


def labs() -> list[Lab]:
    """Return all labs, in the order of the course."""
    return sorted((read(path) for path in LABS.glob("*.toml")), key=lambda lab: lab.number)


def find(name: str) -> Lab:
    """Return a lab by its name; ValueError if there is none."""
    by_name = {lab.name: lab for lab in labs()}
    if name not in by_name:
        others = ", ".join([*by_name, "mutants"])  # that one is property_lab.py's
        raise ValueError(f"there is no lab {name!r}; there is {others}")
    return by_name[name]


def read(path: Path) -> Lab:
    """Read a lab's TOML file; ValueError if a key is missing or unknown."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    tasks = [_fill(Task, task, path) for task in found.pop("task")]
    return _fill(Lab, {"name": path.stem, "tasks": tasks, **found}, path)


def _fill(kind, values: dict, path: Path):
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        wrong = ", ".join(sorted(values.keys() ^ expected))
        raise ValueError(f"{path.name}: missing or unknown in a {kind.__name__.lower()}: {wrong}")
    return kind(**values)
