"""What students' folders try that want points without work, or harm: it earns and leaves nothing.

Each folder in attacks/ attacks the first task of the lab for tests; the second task is solved.
None only reads the reference: that is not prevented.
"""

import os
import shutil
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minidist.course import report
from minidist.course.grader import grade
from minidist.course.sandbox import supervisor
from minidist.course.sandbox.limits import Limits
from minidist.verify.mistakes.overlay import PACKAGE
from tests.course.tiny import NOT_WRAPPED, OTHER, TINY, WRAPPED, choose

ROOT = Path(__file__).parents[2]
ATTACKS = {path.name: path for path in sorted(Path(__file__).with_name("attacks").iterdir())}
SHORT = Limits(seconds=8, memory=1 << 29, processes=32)
LEFT = [Path(folder, "minidist-attack.py") for folder in ("/tmp", "/dev/shm")]
# Without bubblewrap: what the limits, the supervisor and the other user hold.
AS_ANOTHER_USER = ["edits_tests", "fleeing_child", "many_children", "reads_the_grader", "rubbish"]
ALWAYS = "patched_sandbox"  # every day; -m slow: all


def cases():
    """Return the attacks: in bubblewrap and, as another user, some without it."""
    for way, names in (WRAPPED, ATTACKS), (NOT_WRAPPED, AS_ANOTHER_USER):
        for name in names:
            daily = name == ALWAYS and way is WRAPPED
            marks = [*way.marks, *([] if daily else [pytest.mark.slow])]
            yield pytest.param(name, *way.values, marks=marks, id=f"{name} {way.id}")


def processes(inside):
    """Return the supervisors and students whose program lies there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(inside) in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def files():
    """Return the files of the repository with their times of change, rights and sizes.

    A folder has no time here: it changes when another process of the tests makes its __pycache__.
    """
    return {
        path: (found.st_mode, *(() if path.is_dir() else (found.st_mtime_ns, found.st_size)))
        for folder in ("minidist/course", "minidist/pipeline_parallel", "tests/course")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts and (found := path.lstat())
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, wrapped", [*cases()])
def test_an_attack_earns_nothing_and_leaves_nothing(name, wrapped, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    shutil.copytree(ATTACKS[name], folder)
    shutil.copy(PACKAGE / OTHER, folder / "minidist" / OTHER)
    before, holder = files(), Path(tempfile.mkdtemp())
    place, inside = holder / "place", holder / "inside"
    holder.chmod(0o755)  # as /tmp: all users can enter it
    place.mkdir()
    inside.symlink_to(supervisor.INSIDE)  # a name for our processes alone: others grade, too
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(supervisor, "INSIDE", inside)
    choose(monkeypatch, wrapped)
    result = grade(folder, TINY, 1, SHORT)
    assert processes(inside) == [] and list(place.iterdir()) == [] and files() == before
    assert not any(path.exists() for path in LEFT)
    shutil.rmtree(holder)
    assert result.defences.startswith("bubblewrap") == wrapped
    assert [verdict.points for verdict in result.verdicts] == [0, 5], report.text(result)
    assert "\x1b" not in report.text(result)
    ElementTree.fromstring(report.junit(result))
