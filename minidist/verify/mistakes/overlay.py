"""minidist with some files replaced: by a student's, by blanked or by mutated ones.

The result is a folder to put first on the path of a *new* process, where `import minidist` then
finds it. The running package does not change. A process that has imported no minidist yet may load
this file by itself (tests/conftest.py), and then put such a folder first on its own path.
"""

import os
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[2]  # the reference: the package that is running
# In a package that `build` wrote: where the reference is.
BUILT_FROM = "verify/mistakes/built_from.txt"


def build(
    folder: Path,
    files: dict[str, str],
    leave_out: tuple[str, ...] = (),
    linked: Path | None = None,
) -> Path:
    """Write minidist into `folder`/minidist, with the text of some files replaced.

    files      {path in the package, as "pipeline_parallel/gpipe.py": source}
    leave_out  folders or files of the package that are not to be there
    linked     a folder that this has written: other files are links to its own, not copies

    Returns `folder`. ValueError: a path that the package does not have, or a folder that has one.
    """
    unknown = sorted(path for path in files if not (PACKAGE / path).is_file())
    if unknown:
        raise _wrong_input(f"minidist has no {', '.join(unknown)}; replace only files that it has")
    package = folder / "minidist"
    if package.exists():
        raise _wrong_input(f"{package} exists already; choose an empty folder")

    original = PACKAGE if linked is None else linked / "minidist"

    def ignored(where: str, names: list[str]) -> set[str]:
        inside = Path(where).relative_to(original)
        return {name for name in names if (inside / name).as_posix() in leave_out}

    copy = shutil.copy2 if linked is None else os.link
    shutil.copytree(original, package, ignore=ignored, copy_function=copy)
    if (package / BUILT_FROM).parent.is_dir():
        files = files | {BUILT_FROM: str(linked or reference())}
    for path, source in files.items():
        (package / path).unlink(missing_ok=True)  # a new file: what is compiled is not stale
        (package / path).write_text(source, encoding="utf-8")
    return folder


def is_built(folder: Path) -> bool:
    """Return whether `build` has written this folder: all of minidist is there."""
    return (folder / "minidist" / BUILT_FROM).is_file()


def replaced(folder: Path) -> dict[str, str]:
    """Return {path in the package: source} of the Python files in `folder`/minidist."""
    package = folder / "minidist"
    if not package.is_dir():
        raise _wrong_input(f"{folder} has no folder minidist; it should hold the files to replace")
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
        if path.is_file()  # no pipe, and no link to a device: those never end
    }


def reference() -> Path:
    """Return the folder that has the minidist from which `build` wrote this one, or this one."""
    note = PACKAGE / BUILT_FROM
    return Path(note.read_text(encoding="utf-8")) if note.is_file() else PACKAGE.parent


def _wrong_input(message: str) -> ValueError:
    from minidist.errors import WrongInput  # at the head it would decide which minidist there is

    return WrongInput(message)
