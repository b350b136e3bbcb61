"""What does not end by itself: `test_killed.py` kills the pytest that runs this."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minidist.course.grader import grade
from minidist.course.sandbox.limits import Limits
from tests.course.tiny import TINY

ATTACK = Path(__file__).parent / "course" / "attacks" / "endless_loop"
READY = os.environ.get("LEFT_BEHIND", "")  # a folder


def computes(group):
    """Let one rank compute, and one wait for it."""
    Path(READY, f"{os.getpid()}").touch()
    while group.rank == 0:
        pass
    group.recv(0)


LESSON = f"import minidist; from {__name__} import computes; minidist.run(computes, 2)"


@pytest.mark.timeout(600)
def test_endless(cluster):
    started = [
        lambda: cluster(2).run(computes),
        lambda: subprocess.run([sys.executable, "-c", LESSON], start_new_session=True),
        lambda: grade(ATTACK, TINY, limits=Limits(seconds=600)),
    ]
    with ThreadPoolExecutor(len(started)) as threads:
        for start in started:
            threads.submit(start)
        time.sleep(600)
