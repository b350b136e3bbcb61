"""`minidist lab`: hand out a lab, test it, grade it, export it."""

import argparse
import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep

from minidist.cli import lab_teacher
from minidist.cli.arguments import SEED, add_option, seconds
from minidist.course import grader, property_lab, report, starter
from minidist.course.export import export
from minidist.course.lab import MUTANTS, find, labs, of_mutants
from minidist.course.sandbox.limits import Limits
from minidist.course.sandbox.untrusted import plain
from minidist.course.submissions import LABEL, label
from minidist.errors import WrongInput, is_wrong_input

POLL = 0.3  # seconds between two looks at the files that --watch waits for
FORMATS = {"text": report.text, "junit": report.junit, "gradescope": report.gradescope}


EXAMPLES = (
    "minidist lab list",
    "minidist lab new collectives answers",
    "minidist lab test answers --task 2.3 --watch",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its actions, each with its arguments."""
    parser.description = (
        "Labs in which students write parts of minidist. `list` them, make a `new` one, `test` it "
        "while you write, `grade` what was handed in."
    )
    parser.set_defaults(run=partial(_help, parser))
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for name, (run, help, description) in ACTIONS.items():
        action = actions.add_parser(name, help=help, description=description)
        action.set_defaults(run=run)
        if name in ("new", "export"):
            add_option(action, "lab", "its name, from `minidist lab list`", metavar="LAB")
            add_option(action, "folder", "a new or empty folder", Path, "DIR")
        if name == "test":
            add_option(action, "--task", "only this one, as 4.2", metavar="TASK")
            words = "test again whenever a file of the lab is saved, until Ctrl-C"
            action.add_argument("--watch", action="store_true", help=words)
        if name in ("test", "grade"):
            add_option(action, "folder", "what was handed in", Path, "DIR")
            words = "the lab (default: the one that lab.txt in DIR names)"
            add_option(action, "--lab", words, metavar="NAME")
        if name in ("test", "grade", "grade-all"):
            add_option(action, "--seconds", "time limit of each task", seconds, default=20.0)
        if name in ("export", "grade", "grade-all"):
            words = "of the hidden questions, or a file that has it (default: random)"
            add_option(action, "--seed", words, _seed)
        if name == "export":
            words = "Gradescope grades everybody's own variants, known by their e-mail"
            action.add_argument("--variants", action="store_true", help=words)
        if name in ("new", "grade"):
            words = "whose variants of the tasks it is"
            words += ", or Gradescope's submission_metadata.json" if name == "grade" else ""
            words += " (default: nobody's)" if name == "new" else " (default: as lab.txt says)"
            add_option(action, "--student", words, metavar="NAME")
        if name == "grade":
            add_option(action, "--format", "of the report", choices=FORMATS, default="text")
            words = "where the report goes; - is the terminal"
            add_option(action, "--output", words, metavar="FILE")
            action.set_defaults(output="-")
        if name in ("similar", "grade-all", "report"):
            lab_teacher.add_arguments(name, action)


def _help(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    parser.print_help()
    return 2


def _seed(text: str) -> int:
    """Read a seed, or the file that has it: other users can see the words of a command."""
    if os.path.isfile(text):  # Path.is_file raises where the text is too long for a name
        text = lab_teacher.read_text(Path(text)).strip()
    return int(SEED(text))


def _students(text: str) -> list[str]:
    """Read the name of a student, or Gradescope's file with the e-mails of one or several."""
    if not (name := text.strip().lower()) or name.endswith(".json") != os.path.isfile(text):
        raise WrongInput(f"--student {text!r} is no name, and no file of Gradescope's in JSON")
    if not name.endswith(".json"):
        return [name]
    content = lab_teacher.read_text(Path(text))
    try:
        return [user["email"].strip().lower() for user in json.loads(content)["users"]]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise WrongInput(f"{text} has no users with an email, as Gradescope's file has") from None


def _list(given: argparse.Namespace) -> int:
    last = of_mutants()
    for lab in [*labs(), last]:
        print(f"{lab.number}  {lab.name:<14} {lab.points:>3} points  {lab.title}")
        if lab is not last:
            for task in lab.tasks:
                print(f"       {task.id}  {task.points:>3}, {task.minutes} min  {task.title}")
    print(f"       one task per mutant, {len(last.tasks)} of them")
    return 0


def _new(given: argparse.Namespace) -> int:
    if given.lab == MUTANTS:
        paths = property_lab.write(given.folder)
    else:
        student = "" if given.student is None else _students(given.student)[0]
        paths = starter.write(find(given.lab).for_student(student), given.folder)
    for path in paths:
        print(given.folder / path)
    print(f"\nread {given.folder / 'README.md'}, then: minidist lab test {given.folder}")
    return 0


def _export(given: argparse.Namespace) -> int:
    if given.lab == MUTANTS:
        raise WrongInput("the lab of mutants is not exported: hand out `minidist lab new mutants`")
    for path in export(find(given.lab), given.folder, given.seed, given.variants):
        print(path)
    return 0


def _test(given: argparse.Namespace) -> int:
    while True:
        before = _times(given.folder)
        done = _graded(given, seed=0, task=given.task)
        print(report.text(done, foot=False), end="", flush=True)
        if not given.watch:
            return 0 if done.points == done.lab.points else 1
        print("waiting until a file is saved; Ctrl-C ends this\n", flush=True)
        while _times(given.folder) == before:
            sleep(POLL)


def _times(folder: Path) -> dict[Path, int]:
    """Return when each Python file below a folder's minidist was changed."""
    found = {}
    for path in sorted(folder.glob("minidist/**/*.py")):
        with contextlib.suppress(OSError):  # it was removed in between
            found[path] = path.stat().st_mtime_ns
    return found


def _grade(given: argparse.Namespace) -> int:
    output = None if given.output == "-" else Path(given.output)
    if output is not None and not output.parent.is_dir():
        raise WrongInput(f"cannot write {output}: there is no folder {output.parent}")
    if output is not None and output.is_dir():
        raise WrongInput(f"cannot write {output}: it is a folder")
    try:
        message = FORMATS[given.format](_graded(given, given.seed))
    except ValueError as error:
        if given.format == "gradescope" and is_wrong_input(error):
            _write(report.gradescope_refusal(str(error)), output)
        raise
    _write(message, output)
    return 0


def _write(text: str, output: Path | None) -> None:
    """Write a report to a file, or to the terminal."""
    if output is None:
        print(text.removesuffix("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        print(text)  # it took a while to make
        raise WrongInput(f"cannot write {output}: {error.strerror}") from None


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


@ended_by_signals()
def _graded(given: argparse.Namespace, seed: int | None, task: str | None = None) -> grader.Grade:
    limits = Limits(given.seconds)
    said, made_for = label(given.folder)
    folder = plain(str(given.folder))
    if not (name := given.lab or said):
        known = given.folder.exists()
        why = f"{folder} has no {LABEL}, which names its lab; pass the name: --lab NAME"
        raise WrongInput(why if known else f"there is no folder {folder}")
    if said and said != name:
        why = f"its {LABEL} says {said[:40]!r}, the questions are of {name!r}"
        print(f"minidist: {folder}: {why}", file=sys.stderr)
    grade = property_lab.grade if name == MUTANTS else grader.grade
    made_for = made_for.strip().lower()
    named = vars(given).get("student")
    students = [made_for] if named is None else _students(named)
    student = made_for if made_for in students else students[0]
    done = grade(given.folder, find(name).for_student(student), seed, limits, task=task)
    if student == made_for:
        return done
    made_for = plain(made_for)[:100] or "no student"
    return replace(done, remark=f"This folder was made for {made_for}; it is graded for {student}.")


ACTIONS = {  # what runs, and what it does, in a line and in full
    "list": (_list, "list the labs, their tasks and points", "List the labs and their tasks."),
    "new": (_new, "write a starter", "Write what a student begins with into a new folder."),
    "export": (
        _export,
        "write what a teacher hands out and grades with",
        "Write into a new folder: release/ for students, instructor/ with the solution, and for "
        "grading plain/, autograder.zip for Gradescope, classroom/ for repositories on GitHub.",
    ),
    "test": (
        _test,
        "test a folder with the public questions",
        "Ask the public questions; exit status 1 if an answer is wrong.",
    ),
    "grade": (
        _grade,
        "grade a folder with hidden questions",
        "Ask the same questions with hidden numbers, and give points. The exit status is 0 "
        "whatever the points, and 2 if there was nothing to grade.",
    ),
    "similar": (
        lab_teacher.similar,
        "rank pairs of submissions by the code that they share",
        "Compare all submissions with each other and with the package, whatever their names and "
        "the order of their functions. Read a pair before you judge: a share is no proof.",
    ),
    "grade-all": (
        ended_by_signals()(lab_teacher.grade_class),
        "grade all submissions in a folder, side by side",
        "Grade every subfolder and .zip of a folder with the same hidden questions. Each result is "
        "saved at once: an interrupted run goes on where it was, and changed files are graded "
        "again. At the end: the points' distribution, the tasks that most failed, the causes.",
    ),
    "report": (
        lab_teacher.report,
        "make a page of the results of grade-all",
        "Write an HTML page of the results of `minidist lab grade-all`, with pictures, no scripts.",
    ),
}
