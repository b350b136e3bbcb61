"""Students: folders with the reference of some tasks, the starter of others, and mistakes."""

from collections.abc import Iterable
from dataclasses import replace

from minidist.course.grader import Grade, grade
from minidist.course.lab import Lab
from minidist.course.sandbox.limits import Limits
from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE


def reference(lab: Lab) -> dict[str, str]:
    return {path: (PACKAGE / path).read_text(encoding="utf-8") for path in lab.files}


def starter(lab: Lab, done: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the files of a student who has done these tasks and no other."""
    left = [task for task in lab.tasks if task.id not in done]
    return reference(lab) | replace(lab, tasks=left).blanked()


def changed(lab: Lab, edits: Iterable[Edit]) -> dict[str, str]:
    """Return the reference with some edits made."""
    files = reference(lab)
    for edit in edits:
        files[edit.path] = edit.apply(files[edit.path])
    return files


def only(lab: Lab, *ids: str) -> Lab:
    """Return the lab with some tasks, but all files to hand in."""
    blanks = [entry for task in lab.tasks for entry in task.blanks]
    return replace(
        lab, tasks=[replace(task, blanks=blanks) for task in lab.tasks if task.id in ids]
    )


def hand_in(folder, files: dict[str, str], label: str = ""):
    """Write what a student hands in, with a lab.txt if there is a label; return the folder."""
    for path, source in files.items():
        target = folder / "minidist" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")
    if label:
        (folder / "lab.txt").write_text(label, encoding="utf-8")
    return folder


PATIENT = Limits(seconds=200)  # no mistake is tried after a task's time, which a busy machine needs


def graded(folder, lab: Lab, files: dict[str, str], seed: int | None = 0, **options) -> Grade:
    return grade(hand_in(folder, files), lab, seed, **options)
