"""What a teacher hands out or keeps: a folder for students, the teacher's own, Gradescope's zip."""

import secrets
import zipfile
from importlib.metadata import requires
from pathlib import Path

from minidist.course import starter
from minidist.course.lab import Lab
from minidist.course.submissions import LABEL
from minidist.verify.mistakes.overlay import PACKAGE

SETUP = """#!/usr/bin/env bash
# Runs once, as root, when the autograder's image is built.
set -euo pipefail
apt-get update -q && apt-get install -y -q python3 python3-venv
python3 -c 'import sys; assert sys.version_info >= (3, 11), \\
    f"minidist needs Python 3.11 or newer, this image has {{sys.version.split()[0]}}"'
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install -q {requirements}
chmod -R go= /autograder/source
"""

RUN = """#!/usr/bin/env bash
# Runs for every submission, as root; the student's code runs as another user.
cd /autograder
PYTHONPATH=/autograder/source venv/bin/python -m minidist lab grade submission \\
    --lab {lab} --seed source/seed.txt{student} \\
    --format gradescope --output results/results.json
"""

README = """# {title}: the instructor's folder

| file | what it is |
| --- | --- |
| `solution/` | the reference: full marks for a folder that names no student |
| `test_{lab}.py` | the tests that the tasks are |
| `seed.txt` | the hidden seed of the grader; keep it |

Points:

| task | minutes | points | what it blanks out |
| --- | --- | --- | --- |
{rows}

Written questions, which are not counted in these points:

{essays}

Beside this folder:

- `release/` is what students begin with.
- On any machine, `minidist lab grade-all FOLDER --lab {lab} --seed instructor/seed.txt` grades a
  class: FOLDER has a folder or .zip per student.
- `autograder.zip` is for Gradescope: upload it as it is, on an image with Python 3.11 or newer.

Where the grader is root, as on Gradescope, the student's code runs as another user. On a laptop
both are the same user: install bubblewrap. A grade says in its line "defences" what is not
prevented, and the docstring of `minidist/course/sandbox/__init__.py` says why.
"""


def export(lab: Lab, folder: Path, seed: int | None = None, variants: bool = False) -> list[Path]:
    """Write release/, instructor/, autograder.zip into a new or empty folder.

    seed      the hidden one; by default a random one
    variants  Gradescope grades everybody's own version, whatever lab.txt says
    """
    seed = secrets.randbelow(2**32) if seed is None else seed
    rows = "\n".join(
        f"| {task.id} {task.title} | {task.minutes} | {task.points} | {starter.to_write(task)} |"
        for task in lab.tasks
    )
    essays = "\n".join(
        "\n".join([f"{n}. {essay.question.strip()}", *(f"   - {p}: {s}" for p, s in essay.rubric)])
        for n, essay in enumerate(lab.written, 1)
    )
    files = {
        "README.md": README.format(lab=lab.name, title=lab.title, rows=rows, essays=essays),
        "seed.txt": f"{seed}\n",
        lab.tests.name: lab.tests.read_text(encoding="utf-8"),
        f"solution/{LABEL}": f"{lab.name}\n",
        **{
            f"solution/minidist/{path}": (PACKAGE / path).read_text(encoding="utf-8")
            for path in lab.files
        },
    }
    starter.write_files(folder, {})
    starter.write(lab, folder / "release")
    starter.write_files(folder / "instructor", files)
    student = " --student submission_metadata.json" if variants else ""
    run = RUN.format(lab=lab.name, student=student)
    _archive(folder / "autograder.zip", run, seed)
    return sorted(folder.iterdir())


def _archive(path: Path, run: str, seed: int) -> None:
    """Write the zip that Gradescope expects: setup.sh and run_autograder at its root."""
    lines = requires("minidist") or []
    needed = [line for line in lines if "extra ==" not in line]
    # It runs the tests, and is in an extra: a marker names that.
    needed += [line.partition(";")[0].strip() for line in lines if line.startswith("pytest>")]
    requirements = " ".join(f"'{line}'" for line in needed)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        _script(archive, "setup.sh", SETUP.format(requirements=requirements))
        _script(archive, "run_autograder", run)
        archive.writestr("seed.txt", f"{seed}\n")
        for file in sorted(PACKAGE.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, Path("minidist") / file.relative_to(PACKAGE))


def _script(archive: zipfile.ZipFile, name: str, text: str) -> None:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o100755 << 16
    archive.writestr(entry, text)
