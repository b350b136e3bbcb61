"""A lab of two tasks in two files, for tests of the grader: the first is attacked, the second not.

It stands on its own, so that what the real labs ask may change.
"""

import os
from pathlib import Path

import pytest

from minidist.course.lab import Lab, Task
from minidist.course.sandbox import bubblewrap
from minidist.course.sandbox.limits import LINUX
from minidist.course.sandbox.supervisor import folders
from tests.course import tiny_tests

WHY_NOT = bubblewrap.why_not(os.geteuid() == 0, folders())
WRAPPED = pytest.param(
    True,
    marks=pytest.mark.skipif(WHY_NOT is not None, reason=f"needs bubblewrap: {WHY_NOT}"),
    id="bubblewrap",
)
NOT_WRAPPED = pytest.param(  # another user keeps the attacks from those who run the tests
    False,
    marks=pytest.mark.skipif(not LINUX or os.geteuid() != 0, reason="needs root on Linux"),
    id="another user",
)


def choose(patch, wrapped: bool) -> None:
    """Let bubblewrap be used where it works, or not."""
    if not wrapped:
        patch.setattr(bubblewrap, "why_not", lambda *_: "it is not wanted")


MODULE = "minidist.course.labs.tiny.tiny_tests"  # in a sandbox
GPIPE, OTHER = "pipeline_parallel/gpipe.py", "pipeline_parallel/one_f_one_b.py"


class Tiny(Lab):
    tests = Path(tiny_tests.__file__)


def task(number, function, points):
    return Task(f"9.{number}", function, points, [function])


TINY = Tiny(
    name="tiny",
    number=9,
    title="A lab for tests",
    about="",
    lessons=[],
    tasks=[task(1, f"{GPIPE}:gpipe", 10), task(2, f"{OTHER}:one_f_one_b", 5)],
)
