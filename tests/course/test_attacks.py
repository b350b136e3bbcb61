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
# One of each kind (answers, exits, loops, processes, space, reading, patching) is tried always, in
# bubblewrap; without it what the limits, the supervisor and the other user hold. -m slow: the rest.
ALWAYS = {
    True: """answers_of_another_kind edits_tests endless_loop kills_the_grader many_children memory
    patched_sandbox reads_the_grader sys_exit""".split(),
    False: "edits_tests fleeing_child many_children reads_the_grader rubbish".split(),
}
REST = {wrapped: [name for name in ATTACKS if name not in ALWAYS[wrapped]] for wrapped in ALWAYS}
pytestmark = pytest.mark.timeout(600)  # the first test of a list waits for all of them


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
        for folder in ("minidist", "tests")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts and (found := path.lstat())
    }


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Return a function: graded(names, wrapped) gives {name: Grade}, and keeps them.

    Then nothing must be left or changed.
    """
    kept = {}

    def get(names, wrapped):
        key = str((names, wrapped))
        if key not in kept:
            folders = [handed_in(name, tmp_path_factory.mktemp(name)) for name in names]
            kept[key] = dict(zip(names, grade_all(folders, wrapped), strict=True))
        return kept[key]

    return get


def handed_in(name, folder):
    """Return a copy of an attack's folder, with the second task solved."""
    shutil.copytree(ATTACKS[name], folder, dirs_exist_ok=True)
    shutil.copy(PACKAGE / OTHER, folder / "minidist" / OTHER)
    return folder


def grade_all(folders, wrapped):
    before, holder = files(), Path(tempfile.mkdtemp())
    place, inside = holder / "place", holder / "inside"
    holder.chmod(0o755)  # as /tmp: all users can enter it
    place.mkdir()
    inside.symlink_to(supervisor.INSIDE)  # a name for our processes alone: others grade, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        patch.setattr(supervisor, "INSIDE", inside)
        choose(patch, wrapped)
        grades = [grade(folder, TINY, 1, SHORT) for folder in folders]
    assert processes(inside) == [] and list(place.iterdir()) == [] and files() == before
    assert not any(path.exists() for path in LEFT)
    shutil.rmtree(holder)
    return grades


def earns_nothing(result, wrapped):
    assert result.defences.startswith("bubblewrap") == wrapped
    assert [verdict.points for verdict in result.verdicts] == [0, 5], report.text(result)
    assert "\x1b" not in report.text(result)
    ElementTree.fromstring(report.junit(result))


def cases(names):
    """Return the tests of some attacks: in bubblewrap and, as another user, without it."""
    return [
        pytest.param(name, *way.values, marks=way.marks, id=f"{name} {way.id}")
        for way in (WRAPPED, NOT_WRAPPED)
        for name in names[way.values[0]]
    ]


@pytest.mark.parametrize(("name", "wrapped"), cases(ALWAYS))
def test_an_attack_earns_nothing_and_leaves_nothing(name, wrapped, graded):
    earns_nothing(graded(ALWAYS[wrapped], wrapped)[name], wrapped)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrapped"), cases(REST))
def test_more_attacks_earn_nothing_and_leave_nothing(name, wrapped, graded):
    earns_nothing(graded(REST[wrapped], wrapped)[name], wrapped)
