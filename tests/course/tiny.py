"""A lab of two tasks in two files, for tests of the grader: the first is attacked, the second not.

It stands on its own, so that what the real labs ask may change.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from minidist.course.lab import Lab, Task
from minidist.course.question import ask
from minidist.course.sandbox import bubblewrap
from minidist.course.sandbox.limits import LINUX
from minidist.course.sandbox.supervisor import folders
from minidist.errors import plural
from tests.course import tiny_probes

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


GPIPE, OTHER = "pipeline_parallel/gpipe.py", "pipeline_parallel/one_f_one_b.py"


def order(schedule, p, m):
    about = f"{schedule}, {plural(p, 'rank')}, {m} micro-batches"
    return ask(about, tiny_probes.order, schedule=schedule, p=p, m=m)


def asks(schedule):
    return lambda rng: [order(schedule, p, int(rng.integers(3, 9))) for p in (1, 2, 3)]


class Tiny(Lab):
    questions = SimpleNamespace(QUESTIONS={"9.1": asks("gpipe"), "9.2": asks("1f1b")})
    probes = Path(tiny_probes.__file__)


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
