"""Grade one folder as its lab.txt or a teacher says; read and write a teacher's files."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from minidist.course import grader, property_lab
from minidist.course.lab import MUTANTS, find
from minidist.course.sandbox.limits import Limits
from minidist.course.sandbox.untrusted import plain
from minidist.course.submissions import LABEL, label
from minidist.errors import WrongInput


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Raise ValueError with these words and the reason, where a file of a teacher's fails."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise WrongInput(f"{words}: {why}") from None


def read_text(file: Path) -> str:
    with refused(f"cannot read {file}"):
        return file.read_text(encoding="utf-8")


def write_text(file: Path, text: str) -> None:
    """Write a file, in a folder that is made if it is missing."""
    make_folder(file.parent)
    with refused(f"cannot write {file}"):
        file.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    with refused(f"cannot make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def students_in(text: str) -> list[str]:
    """Read the name of a student, or Gradescope's file with the e-mails of one or several."""
    if not (name := text.strip().lower()) or name.endswith(".json") != os.path.isfile(text):
        raise WrongInput(f"--student {text!r} is no name, and no file of Gradescope's in JSON")
    if not name.endswith(".json"):
        return [name]
    content = read_text(Path(text))
    try:
        return [user["email"].strip().lower() for user in json.loads(content)["users"]]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise WrongInput(f"{text} has no users with an email, as Gradescope's file has") from None


def lab_name(folders: list[Path]) -> str:
    """Return the lab that the first lab.txt of these folders names."""
    if name := next(filter(None, (label(folder)[0] for folder in folders)), ""):
        return name
    raise WrongInput("no lab.txt names the lab of these folders; pass the name: --lab NAME")


def graded(
    folder: Path,
    lab: str | None,
    seconds: float,
    seed: int | None,
    task: str | None = None,
    student: str | None = None,
) -> grader.Grade:
    """Grade a folder; its lab.txt says the lab and the student that nobody has named."""
    lab_named, made_for = label(folder)
    shown = plain(str(folder))
    if not (name := lab or lab_named):
        why = f"{shown} has no {LABEL}, which names its lab; pass the name: --lab NAME"
        raise WrongInput(why if folder.exists() else f"there is no folder {shown}")
    if lab_named and lab_named != name:
        why = f"its {LABEL} says {lab_named[:40]!r}, the tests are of {name!r}"
        print(f"minidist: {shown}: {why}", file=sys.stderr)
    grade = property_lab.grade if name == MUTANTS else grader.grade
    made_for = made_for.strip().lower()
    students = [made_for] if student is None else students_in(student)
    student = made_for if made_for in students else students[0]
    done = grade(folder, find(name).for_student(student), seed, Limits(seconds), task=task)
    if student == made_for:
        return done
    made_for = plain(made_for)[:100] or "no student"
    return replace(done, remark=f"This folder was made for {made_for}; it is graded for {student}.")
