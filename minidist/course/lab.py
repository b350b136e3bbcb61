"""A lab: its tasks, what they are worth, and which functions of minidist each of them blanks out.

A lab is a folder in `labs/`: `lab.toml` has its tasks, `handout.md` their prose, `test_NAME.py` the
tests that they are (inside.py). `variants.toml`, if there is one, has tasks of which each student
has one of several versions: edits of the package, as in verify/mistakes/register.py. Their answers
differ, so an answer to another student's version is wrong.
"""

import re
import tomllib
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from math import floor
from pathlib import Path

from minidist.course.blank import blank
from minidist.errors import WrongInput
from minidist.verify.mistakes import register
from minidist.verify.mistakes.overlay import PACKAGE

LABS = Path(__file__).parent / "labs"
POINTS = 100  # of a lab
MUTANTS = "mutants"  # the lab of property_lab.py
YOURS = "**The version of {}.** {} This counts wherever another text says otherwise."


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
    variants    its versions, of which none is the package's own
    variant     the student's; None: the package's, and any other that does what is asked
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
    variants: tuple[register.Mistake, ...] = ()
    variant: register.Mistake | None = None

    def for_student(self, lab: str, student: str) -> "Task":
        """Return the task in the version that a hash of these names chooses, if it has several."""
        if not self.variants:
            return self
        number = int(sha256(f"{lab} {self.id} {student}".encode()).hexdigest(), 16)
        variant = self.variants[number % len(self.variants)]
        hints = [*self.hints[:-1], variant.hint or self.hints[-1]]
        text = f"{self.text}\n\n{YOURS.format(student, variant.asks)}"
        return replace(self, variant=variant, text=text, hints=hints)

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
    leaderboard  what submissions are ranked by, lower is better; "": they are not ranked
    student  whose variants the tasks are; "": the package's own
    """

    name: str
    number: int
    title: str
    about: str
    lessons: list[str]
    tasks: list[Task]
    written: tuple[Essay, ...] | list[Essay] = ()
    student: str = ""
    leaderboard: str = ""

    points = property(lambda self: sum(task.points for task in self.tasks))

    def for_student(self, student: str) -> "Lab":
        """Return the lab as a student has it; "" is nobody. ValueError: it is no name."""
        student = student.strip().lower()
        if len(student) > 100 or not student.isprintable():
            raise WrongInput(f"a student is one line of at most 100 letters, not {student[:99]!a}")
        if not student:
            return self
        tasks = [task.for_student(self.name, student) for task in self.tasks]
        return replace(self, student=student, tasks=tasks)

    @property
    def variants(self) -> tuple[register.Mistake, ...]:
        """The student's, of all tasks."""
        return tuple(task.variant for task in self.tasks if task.variant)

    @property
    def files(self) -> list[str]:
        """The files to hand in, as paths in the package."""
        return sorted({path for task in self.tasks for path, _ in task.targets})

    def blanked(self) -> dict[str, str]:
        """Return {path in the package: source} with the body of every task taken out."""
        bodies: dict[str, dict[str, str]] = {}
        for task in self.tasks:
            for path, function in task.targets:
                bodies.setdefault(path, {})[function] = task.stub
        return {
            path: blank((PACKAGE / path).read_text(encoding="utf-8"), functions)
            for path, functions in sorted(bodies.items())
        }

    def task(self, id: str) -> Task:
        """Return a task by its id; ValueError if there is none."""
        for task in self.tasks:
            if task.id == id:
                return task
        ids = ", ".join(task.id for task in self.tasks)
        raise WrongInput(f"lab {self.name} has no task {id!r}; it has {ids}")

    @property
    def tests(self) -> Path:
        """The tests that its tasks are."""
        return LABS / self.name / f"test_{self.name}.py"


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


def mutants() -> list[register.Mistake]:
    """Return the mistakes that are mutants, by their names."""
    return [mistake for _, mistake in sorted(register.mistakes().items()) if mistake.family]


def of_mutants() -> Lab:
    """Return the lab of mutants: a task of 2 points for each of them."""
    last = len(labs()) + 1
    tasks = [
        Task(f"{last}.{number}", f"{mutant.family}: {mutant.title}", 2, [], mutant.symptom)
        for number, mutant in enumerate(mutants(), 1)
    ]
    title = "Mutants: properties that only the right implementation has"
    return Lab(MUTANTS, last, title, "", [], tasks)


def find(name: str) -> Lab:
    """Return a lab by its name, also the one of mutants; ValueError if there is none."""
    by_name = {lab.name: lab for lab in labs()}
    if name not in by_name and name != MUTANTS:
        others = ", ".join([*by_name, MUTANTS])
        raise WrongInput(f"there is no lab {name!r}; there is {others}")
    return by_name.get(name) or of_mutants()


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
    file = folder / "variants.toml"
    variants = list(register.mistakes_in(file).values()) if file.is_file() else []
    tasks = []
    for (id, task), points in zip(given.items(), worth, strict=True):
        own = {"points": points, "variants": tuple(v for v in variants if v.task == id)}
        own |= {"id": id, "text": sections.pop(id, ""), "variant": None}
        tasks.append(_filled(Task, own | task, folder))
    if odd := [*sections, *(task.id for task in tasks if not task.text)]:
        raise WrongInput(f"{folder.name}: lab.toml and handout.md differ in task {', '.join(odd)}")
    if odd := [v.name for v in variants if v.task not in given or not (v.asks and v.says)]:
        raise WrongInput(f"{file}: {', '.join(odd)} has no asks, no says, or no task of the lab")
    written = [_filled(Essay, essay, folder) for essay in found.pop("written", [])]
    more = {"name": folder.name, "about": about.strip(), "tasks": tasks, "written": written}
    more["student"] = ""
    return _filled(Lab, {"leaderboard": ""} | found | more, folder)


def _filled(kind, values: dict, folder: Path):
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        wrong = ", ".join(sorted(values.keys() ^ expected))
        what = kind.__name__.lower()
        raise WrongInput(f"{folder.name}/lab.toml: missing or unknown in a {what}: {wrong}")
    return kind(**values)
