"""What students' folders try that want points without work, or harm: it earns and leaves nothing.

Each folder in attacks/ attacks the first task of the lab for tests; the second task is solved.
"""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minidist.course import report, sandbox
from minidist.course.grader import grade
from minidist.course.overlay import PACKAGE
from minidist.course.sandbox import INSIDE
from minidist.course.sandbox.limits import LINUX, Limits
from tests.course.tiny import OTHER, TINY

ROOT = Path(__file__).parents[2]
ATTACKS = {path.name: path for path in sorted(Path(__file__).with_name("attacks").iterdir())}
SHORT = Limits(seconds=3, memory=1 << 29, processes=32)
LEFT = [Path(folder, "minidist-attack.py") for folder in ("/tmp", "/dev/shm")]
# -m slow has the second and third of a kind; of each kind (answers, exits, loops, processes, space,
# reading, patching, output) one is tried always.
MORE = """answers_of_its_own crash disk endless_import endless_threads exit_on_import fleeing_child
fork_bomb misleading_output not_utf8 os_exit output patched_tests reads_tests rubbish
shared_memory stack strange_error syntax_error""".split()
FIRST = [name for name in ATTACKS if name not in MORE]
# What the limits and the supervisor hold by themselves, as where the kernel refuses nothing. It
# needs another user: none of these may meet the processes and files of who runs the tests.
BY_LIMITS = ["fleeing_child", "many_children", "rubbish"]
MORE_BY_LIMITS = ["answers_of_another_kind", "fork_bomb", "kills_the_grader", "output"]  # -m slow
pytestmark = pytest.mark.timeout(600)  # the first test of a list waits for all of them
other_user = pytest.mark.skipif(not LINUX or os.geteuid() != 0, reason="needs root on Linux")


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
    """Return a function: graded(names, options) gives {name: Future of a Grade}, and keeps them.

    They are made two at a time; then nothing must be left or changed.
    """
    kept = {}

    def get(names, **options):
        key = str((names, options))
        if key not in kept:
            folders = [handed_in(name, tmp_path_factory.mktemp(name)) for name in names]
            kept[key] = dict(zip(names, grade_all(folders, options), strict=True))
        return kept[key]

    return get


def handed_in(name, folder):
    """Return a copy of an attack's folder, with the second task solved."""
    shutil.copytree(ATTACKS[name], folder, dirs_exist_ok=True)
    shutil.copy(PACKAGE / OTHER, folder / "minidist" / OTHER)
    return folder


def grade_all(folders, options):
    before, holder = files(), Path(tempfile.mkdtemp())
    place, inside = holder / "place", holder / "inside"
    holder.chmod(0o755)  # as /tmp: all users can enter it
    place.mkdir()
    inside.symlink_to(INSIDE)  # a name for our processes alone: others may grade at the same time
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(tempfile, "tempdir", str(place))
        patch.setattr(sandbox, "INSIDE", inside)
        grades = [threads.submit(grade, f, TINY, 1, SHORT, **options) for f in folders]
    assert processes(inside) == [] and list(place.iterdir()) == [] and files() == before
    assert not any(path.exists() for path in LEFT)
    shutil.rmtree(holder)
    return grades


def earns_nothing(result):
    assert [verdict.points for verdict in result.verdicts] == [0, 5], report.text(result)
    assert "\x1b" not in report.text(result)
    ElementTree.fromstring(report.junit(result))


@pytest.mark.parametrize("name", FIRST)
def test_an_attack_earns_nothing_and_leaves_nothing(name, graded):
    earns_nothing(graded(FIRST)[name].result())


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_attacks_earn_nothing_and_leave_nothing(name, graded):
    earns_nothing(graded(MORE)[name].result())


@other_user
@pytest.mark.parametrize("name", BY_LIMITS)
def test_limits_and_the_supervisor_hold_without_the_kernels_help(name, graded):
    earns_nothing(without_the_kernel(graded, BY_LIMITS)[name].result())


@other_user
@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BY_LIMITS)
def test_limits_and_the_supervisor_hold_more_without_the_kernels_help(name, graded):
    earns_nothing(without_the_kernel(graded, MORE_BY_LIMITS)[name].result())


def without_the_kernel(graded, names):
    found = graded(names, without=("landlock", "seccomp"))
    said = " ".join(found[names[0]].result().defences)
    assert "Landlock" not in said and "seccomp" not in said
    return found
