"""A lab: its tasks, what they are worth, and which functions of minidist each of them blanks out.

A lab is a folder in `labs/`: `lab.toml` has its tasks, `handout.md` their prose, `questions.py`
what the grader asks. `probes.py` puts that to a student's code, in a sandbox, and to the package,
whose answers are right.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from importlib import import_module
from math import floor
from pathlib import Path
from types import ModuleType

from minidist.course.blank import blank
from minidist.mistakes.overlay import PACKAGE

LABS = Path(__file__).parent / "labs"
POINTS = 100  # of a lab


@dataclass(frozen=True)
class Task:
    """One thing to write.

    id          "4.2": the second task of lab 4
    points      its part of POINTS, in proportion to its minutes
    blanks      what to write: "pipeline_parallel/gpipe.py: gpipe", "comm/mesh.py: Mesh.rank_of"
    text        what is asked, in Markdown
    minutes     how long it takes to write, once the lessons are read: an estimate
    difficulty  1 to 3
    numbers     what the grader measures and compares with a closed form
    hints       what to notice; how to go about it; nearly the code
    """

    id: str
    title: str
    points: int
    blanks: list[str]
    text: str = ""
    minutes: int = 0
    difficulty: int = 1
    numbers: tuple[str, ...] | list[str] = ()
    hints: tuple[str, ...] | list[str] = ()

    @property
    def targets(self) -> list[tuple[str, str]]:
        """(path in the package, qualified name) of everything that it blanks out."""
        entries = [entry.partition(":") for entry in self.blanks]
        return [(path, name) for path, _, names in entries for name in names.split()]

    @property
    def stub(self) -> str:
        """What the body of a function says that is still to be written."""
        return f"Task {self.id}: {self.title}"


@dataclass(frozen=True)
class Essay:
    """A question that a teacher reads the answer to; it is not counted in the points.

    rubric  [points, what an answer says that earns them]
    """

    question: str
    rubric: list[tuple[int, str]]


@dataclass(frozen=True)
class Lab:
    """Some tasks around one idea.

    about    what it is about, in Markdown
    lessons  what to read before
    written  what is answered in words
    """

    name: str
    number: int
    title: str
    about: str
    lessons: list[str]
    tasks: list[Task]
    written: tuple[Essay, ...] | list[Essay] = ()

    points = property(lambda self: sum(task.points for task in self.tasks))

    @property
    def files(self) -> list[str]:
        """The files to hand in, as paths in the package."""
        return sorted({path for task in self.tasks for path, _ in task.targets})

    def blanked(self) -> dict[str, str]:
        """Return {path in the package: source} with the body of every task taken out."""
        bodies: dict[str, dict[str, str]] = {path: {} for path in self.files}
        for task in self.tasks:
            for path, function in task.targets:
                bodies[path][function] = task.stub
        return {
            path: blank((PACKAGE / path).read_text(encoding="utf-8"), functions)
            for path, functions in bodies.items()
        }

    def task(self, id: str) -> Task:
        """Return a task by its id; ValueError if there is none."""
        for task in self.tasks:
            if task.id == id:
                return task
        ids = ", ".join(task.id for task in self.tasks)
        raise ValueError(f"lab {self.name} has no task {id!r}; it has {ids}")

    @property
    def questions(self) -> ModuleType:
        return import_module(f"minidist.course.labs.{self.name}.questions")

    @property
    def probes(self) -> Path:
        return LABS / self.name / "probes.py"


def shares(total: int, weights: list[int]) -> list[int]:
    """Cut whole points in proportion to weights, what is left over by the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [floor(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: total - sum(found)]:
        found[i] += 1
    return found


def labs() -> list[Lab]:
    """Return all labs, in the order of the course."""
    found = [read(path.parent) for path in LABS.glob("*/lab.toml")]
    return sorted(found, key=lambda lab: lab.number)


def find(name: str) -> Lab:
    """Return a lab by its name; ValueError if there is none."""
    by_name = {lab.name: lab for lab in labs()}
    if name not in by_name:
        others = ", ".join([*by_name, "mutants"])  # that one is property_lab.py's
        raise ValueError(f"there is no lab {name!r}; there is {others}")
    return by_name[name]


def read(folder: Path) -> Lab:
    """Read a lab's folder; ValueError: a key is missing or unknown, a task is not in the handout.

    Its 100 points are divided by the tasks' minutes.
    """
    found = tomllib.loads((folder / "lab.toml").read_text(encoding="utf-8"))
    text = (folder / "handout.md").read_text(encoding="utf-8")
    about, *rest = re.split(r"^## Task (\S+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], map(str.strip, rest[1::2]), strict=True))
    given = found.pop("task")  # {id: its table}
    worth = shares(POINTS, [task.get("minutes", 1) for task in given.values()])
    tasks = [
        _filled(Task, {"id": id, "text": sections.pop(id, ""), "points": points} | task, folder)
        for (id, task), points in zip(given.items(), worth, strict=True)
    ]
    if odd := [*sections, *(task.id for task in tasks if not task.text)]:
        raise ValueError(f"{folder.name}: lab.toml and handout.md differ in task {', '.join(odd)}")
    written = [_filled(Essay, essay, folder) for essay in found.pop("written", [])]
    more = {"name": folder.name, "about": about.strip(), "tasks": tasks, "written": written}
    return _filled(Lab, found | more, folder)


def _filled(kind, values: dict, folder: Path):
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        wrong = ", ".join(sorted(values.keys() ^ expected))
        what = kind.__name__.lower()
        raise ValueError(f"{folder.name}/lab.toml: missing or unknown in a {what}: {wrong}")
    return kind(**values)
