"""Nothing of what tests have started outlives a pytest that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comm.test_cluster import gone

ROOT = Path(__file__).parents[1]


def below(pid):
    """Return the processes below this one, {pid: its command}, the first started first."""
    children, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return {each: commands[each] for each in found[1:]}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("who", ["pytest", pytest.param("worker", marks=pytest.mark.slow)])
def test_ranks_lessons_and_students_end_with_a_killed_pytest(tmp_path, who):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1"]
    with subprocess.Popen(
        [*command, "tests/left_behind.py"],
        cwd=ROOT,
        env=os.environ | {"LEFT_BEHIND": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        found, deadline = {}, time.monotonic() + 90
        try:
            while not all_there(found, tmp_path) and time.monotonic() < deadline:
                time.sleep(0.1)
                found = below(run.pid)
            assert all_there(found, tmp_path), found
            if who == "worker":
                (worker,) = [pid for pid, said in found.items() if "exec(eval(" in said]
                os.kill(worker, signal.SIGKILL)
            else:
                run.kill()
            assert gone(found, within=60), found
        finally:
            run.kill()


def all_there(found, folder):
    """Return whether four ranks compute and a student does: those and the supervisor are two."""
    inside = [said for said in found.values() if "inside" in said and "bwrap" not in said]
    return len(list(folder.iterdir())) == 4 and len(inside) == 2
