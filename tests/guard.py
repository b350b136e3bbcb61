"""End what a pytest process has started when it is killed (Linux).

Ranks and supervisors read a pipe of their parent's and end by themselves. A lesson, a command or
another pytest would go on: a killed process ends nobody. So every pytest process, also a worker of
xdist, marks the environment of what it starts, and has a guard in a session of its own that waits
at a pipe. The pipe's end without a word means that pytest was killed, and the guard kills what has
the mark.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MARK = "MINIDIST_STARTED_BY"
PROCESSES = Path("/proc")


def start() -> Callable[[], None]:
    """Guard this process; return what dismisses the guard."""
    if not (PROCESSES / "self" / "environ").exists():
        return lambda: None
    os.environ.pop(MARK, None)  # the guard has no mark
    reader, writer = os.pipe()  # no other child inherits these
    mark = f"{os.getpid()} {time.time_ns()}"
    command = [sys.executable, "-I", "-S", __file__, mark]
    guard = subprocess.Popen(command, stdin=reader, start_new_session=True, cwd="/")
    os.close(reader)
    os.environ[MARK] = mark

    def dismiss():
        os.write(writer, b"done")
        os.close(writer)
        guard.wait()

    return dismiss


def started_by(mark: str) -> list[int]:
    """Return the processes whose environment has the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in PROCESSES.glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def main() -> None:
    if sys.stdin.read():
        return
    give_up = time.monotonic() + 10
    while (left := started_by(sys.argv[1])) and time.monotonic() < give_up:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


if __name__ == "__main__":
    main()
