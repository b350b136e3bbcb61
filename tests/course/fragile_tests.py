"""Tests that break the grader, as no lab's do: it ends at an empty answer, and hangs at another."""

import os
import signal
import time

from minidist.course.inside import inside, task
from minidist.pipeline_parallel import programs


@inside(any_form=True)
def first_actions(p, m):
    return [str(action) for action in programs("gpipe", p, m)[0]]


@task("9.1")
def test_gpipe():
    actions = first_actions(2, 3)
    if not actions:
        os.kill(os.getpid(), signal.SIGKILL)
    if actions == ["1"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
