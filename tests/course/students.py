"""Students: folders with the reference of some tasks, the starter of others, and mistakes."""

from dataclasses import replace

from minidist.course.grader import Grade, grade
from minidist.course.lab import Lab
from minidist.course.overlay import PACKAGE


def reference(lab: Lab) -> dict[str, str]:
    return {path: (PACKAGE / path).read_text(encoding="utf-8") for path in lab.files}


def starter(lab: Lab, done: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the files of a student who has done these tasks and no other."""
    left = [task for task in lab.tasks if task.id not in done]
    return reference(lab) | replace(lab, tasks=left).blanked()


def changed(lab: Lab, path: str, here, there) -> dict[str, str]:
    """Return the reference with a piece of its text, or several, which are there once, replaced."""
    files = reference(lab)
    pieces = [(here, there)] if isinstance(here, str) else zip(here, there, strict=True)
    for old, new in pieces:
        assert files[path].count(old) == 1, f"{path} has {old!r} {files[path].count(old)} times"
        files[path] = files[path].replace(old, new)
    return files


def only(lab: Lab, id: str) -> Lab:
    """Return the lab with one task, but all files to hand in."""
    (task,) = (task for task in lab.tasks if task.id == id)
    blanks = [entry for task in lab.tasks for entry in task.blanks]
    return replace(lab, tasks=[replace(task, blanks=blanks)])


def graded(folder, lab: Lab, files: dict[str, str], seed: int = 0) -> Grade:
    for path, source in files.items():
        target = folder / "minidist" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")
    return grade(folder, lab, seed)
