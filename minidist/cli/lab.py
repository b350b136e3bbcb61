"""`minidist lab`: hand out, test and grade labs or a class. `minidist mutants`: test the tests."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep

from minidist.cli.options import JSON, SECONDS, SEED, Command, argument, flag, option, whole
from minidist.course import class_report, mutants, property_lab, report, starter
from minidist.course.export import export
from minidist.course.folders import (
    graded,
    lab_name,
    make_folder,
    read_text,
    students_in,
    write_text,
)
from minidist.course.grade_all import (
    Job,
    Result,
    compared,
    earlier_results,
    grade_all,
    place,
    save,
)
from minidist.course.lab import MUTANTS, find, labs, of_mutants
from minidist.course.sandbox.limits import Limits
from minidist.errors import WrongInput, is_wrong_input

POLL = 0.3  # seconds between two looks at the files that --watch waits for
FORMATS = {"text": report.text, "junit": report.junit, "gradescope": report.gradescope}


def read_seed(text: str) -> int:
    """Read a seed, or the file that has it: other users can see the words of a command."""
    if os.path.isfile(text):  # Path.is_file raises where the text is too long for a name
        text = read_text(Path(text)).strip()
    return int(SEED(text))


@contextlib.contextmanager
def ended_by_signals():
    """Let SIGTERM and SIGHUP end the command by an exception, so that it cleans up."""
    kinds = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {kind: signal.signal(kind, lambda kind, _: sys.exit(128 + kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


NAME = "its name, from `minidist lab list`", "LAB"  # from here: options of several actions
NEW_FOLDER = "a new or empty folder", "DIR", Path
HANDED_IN = "what was handed in", "DIR", Path
CLASS = "has a folder or a .zip per submission", "FOLDER", Path
ITS_LAB = "the lab (default: the one that lab.txt in DIR names)", str, "NAME"
FIRST_LAB = "the lab (default: the one that the first lab.txt names)", str, "NAME"
RESULTS = "the folder of the results (default: FOLDER.results)", Path, "DIR"
LIMIT = "time limit of each task", SECONDS
HIDDEN = "of the hidden numbers, or a file that has it (default: random)", read_seed


@dataclass
class ListCommand(Command):
    """List the labs and their tasks."""

    def run(self) -> int:
        last = of_mutants()
        for lab in [*labs(), last]:
            print(f"{lab.number}  {lab.name:<14} {lab.points:>3} points  {lab.title}")
            if lab is not last:
                for task in lab.tasks:
                    print(f"       {task.id}  {task.points:>3}, {task.minutes} min  {task.title}")
        print(f"       one task per mutant, {len(last.tasks)} of them")
        return 0


@dataclass
class NewCommand(Command):
    """Write what a student begins with into a new folder."""

    lab: str = argument(*NAME)
    folder: Path = argument(*NEW_FOLDER)
    student: str | None = option(
        "whose variants of the tasks it is (default: nobody's)", metavar="NAME"
    )

    def run(self) -> int:
        if self.lab == MUTANTS:
            paths = property_lab.write(self.folder)
        else:
            student = "" if self.student is None else students_in(self.student)[0]
            paths = starter.write(find(self.lab).for_student(student), self.folder)
        for path in paths:
            print(self.folder / path)
        print(f"\nread {self.folder / 'README.md'}, then: minidist lab test {self.folder}")
        return 0


@dataclass
class ExportCommand(Command):
    """Write into a new folder: release/ for students, instructor/ with the solution and the hidden
    seed, and autograder.zip for Gradescope."""

    lab: str = argument(*NAME)
    folder: Path = argument(*NEW_FOLDER)
    seed: int | None = option(*HIDDEN)
    variants: bool = flag("Gradescope grades everybody's own variants, known by their e-mail")

    def run(self) -> int:
        if self.lab == MUTANTS:
            raise WrongInput(
                "the lab of mutants is not exported: hand out `minidist lab new mutants`"
            )
        for path in export(find(self.lab), self.folder, self.seed, self.variants):
            print(path)
        return 0


@dataclass
class TestCommand(Command):
    """Run the tests with public numbers; exit status 1 if one fails."""

    task: str | None = option("only this one, as 4.2", metavar="TASK")
    watch: bool = flag("test again whenever a file of the lab is saved, until Ctrl-C")
    folder: Path = argument(*HANDED_IN)
    lab: str | None = option(*ITS_LAB)
    seconds: float = option(*LIMIT, default=20.0)

    def run(self) -> int:
        while True:
            before = self.times()
            with ended_by_signals():
                done = graded(self.folder, self.lab, self.seconds, seed=0, task=self.task)
            print(report.text(done, foot=False), end="", flush=True)
            if not self.watch:
                return 0 if done.points == done.lab.points else 1
            print("waiting until a file is saved; Ctrl-C ends this\n", flush=True)
            while self.times() == before:
                sleep(POLL)

    def times(self) -> dict[Path, int]:
        """Return when each Python file below the folder's minidist was changed."""
        times = {}
        for path in sorted(self.folder.glob("minidist/**/*.py")):
            with contextlib.suppress(OSError):  # it was removed in between
                times[path] = path.stat().st_mtime_ns
        return times


@dataclass
class GradeCommand(Command):
    """Run the same tests with hidden numbers, and give points. The exit status is 0
    whatever the points, and 2 if there was nothing to grade."""

    folder: Path = argument(*HANDED_IN)
    lab: str | None = option(*ITS_LAB)
    seconds: float = option(*LIMIT, default=20.0)
    seed: int | None = option(*HIDDEN)
    student: str | None = option(
        "whose variants of the tasks it is, or Gradescope's submission_metadata.json (default: as "
        "lab.txt says)",
        metavar="NAME",
    )
    format: str = option("of the report", choices=FORMATS, default="text")
    output: str | None = option("where the report goes; - is the terminal", metavar="FILE")

    def run(self) -> int:
        output = None if self.output in (None, "-") else Path(self.output)
        if output is not None and not output.parent.is_dir():
            raise WrongInput(f"cannot write {output}: there is no folder {output.parent}")
        if output is not None and output.is_dir():
            raise WrongInput(f"cannot write {output}: it is a folder")
        try:
            with ended_by_signals():
                done = graded(self.folder, self.lab, self.seconds, self.seed, student=self.student)
            message = FORMATS[self.format](done)
        except ValueError as error:
            if self.format == "gradescope" and is_wrong_input(error):
                self.write(report.gradescope_refusal(str(error)), output)
            raise
        self.write(message, output)
        return 0

    def write(self, text: str, output: Path | None) -> None:
        if output is None:
            print(text.removesuffix("\n"))
            return
        try:
            write_text(output, text)
        except WrongInput:
            print(text)  # it took a while to make
            raise


@dataclass
class GradeAllCommand(Command):
    """Grade every subfolder and .zip of a folder with the same hidden numbers. Each result is
    saved at once: an interrupted run goes on where it was, and changed files are graded
    again. At the end: the points' distribution, the tasks that most failed, the causes."""

    seconds: float = option(*LIMIT, default=20.0)
    seed: int | None = option(*HIDDEN)
    lab: str | None = option(*FIRST_LAB)
    folder: Path = argument(*CLASS)
    results: Path | None = option(*RESULTS)
    csv: Path | None = option(
        "the table of points (default: points.csv among the results)", Path, "FILE"
    )
    students: Path | None = option(
        "a file with the class, a name per line as in lab.txt: others are not graded", Path, "FILE"
    )
    jobs: int = option(
        "submissions that are graded at once",
        whole(256, "each is a process that has processes of its own"),
        default=2,
    )
    regrade: bool = flag("grade all again, with the same seed, and show whose points have changed")

    @ended_by_signals()
    def run(self) -> int:
        """Grade every submission; print a line for each, and a table at the end."""
        paths, folder, earlier = earlier_results(self.folder, self.results)
        newest = list(earlier.values())[-1:]
        lab = find(self.lab or (newest[0].lab if newest else lab_name([self.folder, *paths])))
        drawn = newest[0].seed if newest else secrets.randbits(32)
        seed = drawn if self.seed is None else self.seed
        patience, students = 60 + 3 * self.seconds * len(lab.tasks), None
        if self.students is not None:
            names = read_text(self.students).lower().splitlines()
            students = frozenset(name.strip() for name in names if name.strip())
        job = Job(lab, seed, folder, patience, Limits(self.seconds), students)
        before = {r.name: r.sum for r in earlier.values() if r.points and r.lab == lab.name}
        if self.regrade:
            for path, result in earlier.items():  # if this is interrupted, their seed is known
                save(replace(result, key=""), place(folder, path))
        if newest and seed != newest[0].seed:
            print(f"the results are of seed {newest[0].seed}: all are graded again, with {seed}")
        file = self.csv or folder / "points.csv"
        done: list[Result] = []

        def show(result: Result) -> None:
            done.append(result)
            points = f"{result.sum} points"
            if before.get(result.name, result.sum) != result.sum:
                points = f"{before[result.name]} -> {points}"
            print(f"{len(done)} of {len(paths)}  {result.name}: {result.why or points}", flush=True)

        make_folder(folder)
        write_text(file, "")  # it shall not fail after hours
        grade_all(paths, job, self.jobs, show)
        like, pairs = compared(paths, lab)
        if students is not None:
            missing = sorted(students - {result.student for result in done})
            why = "nothing that names this student was handed in"
            done += [Result("", lab.name, seed, student=name, why=why) for name in missing]
        done.sort(key=lambda result: result.name)
        write_text(file, class_report.as_csv(lab, done, like, pairs))
        print(f"\n{class_report.summary(lab, done, pairs)}\n\n{file}; texts for students: {folder}")
        return 0


ACTIONS: dict[str, tuple[type[Command], str]] = {
    "list": (ListCommand, "list the labs, their tasks and points"),
    "new": (NewCommand, "write a starter"),
    "export": (ExportCommand, "write what a teacher hands out and grades with"),
    "test": (TestCommand, "test a folder with public numbers"),
    "grade": (GradeCommand, "grade a folder with hidden numbers"),
    "grade-all": (GradeAllCommand, "grade all submissions in a folder, side by side"),
}


@dataclass
class LabCommand(Command):
    """Labs in which students write parts of minidist. `list` them, make a `new` one, `test` it
    while you write, `grade` what was handed in."""

    EXAMPLES = (
        "minidist lab list",
        "minidist lab new collectives answers",
        "minidist lab test answers --task 2.3 --watch",
    )

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        super().add_to(parser)
        actions = parser.add_subparsers(title="actions", metavar="ACTION")
        for name, (action, help) in ACTIONS.items():
            action.add_to(actions.add_parser(name, help=help))

    def run(self) -> int:
        """Print the help: an action is missing."""
        from minidist.cli import parser_of

        parser_of("lab").print_help()
        return 2


@dataclass
class MutantsCommand(Command):
    """Run the repository's tests that are to find a mutant, a small wrong change of the
    reference, until one fails; print which, and what it says of the cause. Exit status 1 if
    a mutant survives. Needs a checkout, with tests."""

    EXAMPLES = (
        "minidist mutants",
        "minidist mutants --name place_from_the_rank",
        "minidist mutants --show place_from_the_rank",
    )
    json: bool = flag(JSON)
    name: list[str] | None = option(
        "only this one; may be repeated", metavar="NAME", action="append"
    )
    show: str | None = option("print this one in words and as a patch", metavar="NAME")

    def run(self) -> int:
        """Print a row per mutant; return 1 if a mutant survives."""
        if self.show is not None:
            mutant = mutants.load(self.show)
            print(f"{mutant.title}\nseen     {mutant.seen}\nsymptom  {mutant.symptom}\n")
            print(mutant.diff(), end="")
            return 0
        chosen = [mutants.load(name) for name in dict.fromkeys(self.name or mutants.names())]
        width, rows = max(len(mutant.name) for mutant in chosen), []
        screen = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)

        def tell(row: dict) -> None:
            rows.append(row)
            if not self.json:
                print(self.in_words(row, width, screen), flush=True)

        with ended_by_signals():
            mutants.judge(chosen, tell)
        rows.sort(key=lambda row: row["name"])
        alive = [row["name"] for row in rows if row["killed_by"] is None]
        verdict = f"{', '.join(alive)} SURVIVED" if alive else "all killed"
        print(json.dumps(rows, indent=2) if self.json else f"mutants: {len(rows)}, {verdict}")
        return 1 if alive else 0

    def in_words(self, row: dict, width: int, screen: int) -> str:
        """Return a row: the mutant, what killed it, and the diagnosis, folded to a screen."""
        lines = (row["diagnosis"] or "").splitlines()
        folded = [textwrap.wrap(line, screen - 4, subsequent_indent="  ") for line in lines]
        head = f"{row['name']:<{width}}  {row['killed_by'] or 'SURVIVED'}"
        return "\n    ".join([head, *(line for lines in folded for line in lines)])
