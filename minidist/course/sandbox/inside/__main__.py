"""The supervisor: runs the student's processes, watches them, and removes everything afterwards.

    python -s -P -S -B inside < orders

It is the grader's child and never runs the student's code itself. The orders come pickled on its
input: what to load once; then to begin a process, to wait for each of its answers, to end it. When
the input ends, because the grader has ended, everything ends here, too. The output has a line of
JSON per order: whether the network was left, and then how the process ended, "" while it has not,
and whether it has begun to answer.
"""

import ctypes
import json
import math
import os
import pickle
import select
import signal
import sys
import time
from contextlib import suppress

sys.path[0:0] = [os.path.dirname(os.path.abspath(__file__))]
import student  # type: ignore[import-not-found]  # noqa: E402  # beside this file

del sys.path[0]

LOOK_EVERY = 0.02  # seconds
CHILD_SUBREAPER, SET_DUMPABLE = 36, 4
NEW_NETWORK, NEW_IPC = 0x40000000, 0x08000000
LINUX = os.path.isdir("/proc/self/task")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    setup = pickle.load(sys.stdin.buffer)
    alone = confine(setup["alone"])
    student.load(setup["modules"], setup["folders"])
    print(json.dumps({"no network": alone}), flush=True)
    while (order := received()) is not None:
        serve(order)


def received() -> dict | None:
    """Return the next order; None if there is none any more."""
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def confine(alone: bool) -> bool:
    """Prepare this process (Linux); return whether it has left the network, if it is to.

    It adopts every descendant whose parent ends. A student's process that is the same user cannot
    trace it.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "prctl"):
        return False
    libc.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    return alone and libc.unshare(NEW_NETWORK | NEW_IPC) == 0


def serve(order: dict) -> None:
    """Run one of the student's processes until the grader wants no more; end what it started."""
    calls, called = os.pipe()
    heard, hear = os.pipe()
    os.set_blocking(called, False)
    child = os.fork()
    if child == 0:
        os.close(called)
        os.close(heard)
        start(order, calls, hear)
    os.close(calls)
    os.close(hear)
    process, watched = Process(child, order), [0, heard]
    awaited, began, ended = "", False, ""
    print(json.dumps({"ended": ended, "began": began}), flush=True)
    try:
        while True:
            ready = select.select(watched, [], [], LOOK_EVERY)[0]
            if heard in ready:
                said = os.read(heard, 4096)
                began = began or said[:1] == b"1"
                if not said:  # all of its processes have ended, or closed it
                    watched.remove(heard)
            if 0 in ready:
                call = received()
                if call is None:
                    sys.exit(1)  # the grader has gone
                if "number" not in call:
                    break
                awaited = f"{order['scratch']}/{call['number']}"
                process.deadline = time.monotonic() + call["seconds"]
                with suppress(OSError):
                    os.write(called, b"1")
            if not ended and (ended := process.ended()):
                end_all(child, order["user"])
            if awaited and (ended or os.path.lexists(awaited)):
                state = "" if os.path.lexists(awaited) else ended
                print(json.dumps({"ended": state, "began": began}), flush=True)
                awaited, process.deadline = "", math.inf
    finally:
        end_all(child, order["user"])
        os.close(called)
        os.close(heard)
    print(json.dumps({"ended": ended, "began": began}), flush=True)


def start(order: dict, calls: int, heard: int) -> None:
    """Become the student's process: in its own group, without the supervisor's descriptors."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file, number)
        os.close(output)
        os.close(nothing)
        sys.stdin = open(0)
        student.main(order, calls, heard)
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(70)
    finally:
        os._exit(0)  # threads that the student's code has started do not hold it up


class Process:
    """A student's process, as it is watched; deadline: of the call that it answers."""

    def __init__(self, pid: int, order: dict):
        self.pid, self.order = pid, order
        self.deadline = math.inf
        self.next_look = 0.0  # at its files and its memory

    def ended(self) -> str:
        """Return how it ended, or why it has to; "" if it goes on."""
        order, now = self.order, time.monotonic()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return f"the process was ended by the signal {signal.Signals(-code).name}"
            return f"the process ended with exit code {code}"
        if now > self.deadline:
            return f"stopped after {order['seconds']:g} s"
        if now > self.next_look:
            self.next_look = now + 0.1
            if space([order["scratch"], order["output"]], order["disk"]) > order["disk"]:
                return f"stopped: it wrote more than {order['disk'] >> 20} MB"
            if resident() > order["memory"]:
                return f"stopped: its processes held more than {order['memory'] >> 20} MB"
        return ""


def end_all(child: int, user: int | None) -> None:
    """Kill every descendant until there is none, however fast they fork."""
    give_up = time.monotonic() + 8
    while time.monotonic() < give_up:
        if user is not None:
            kill_user(user)
        for pid in descendants() if LINUX else [child]:
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill(pid: int) -> None:
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def kill_user(user: int) -> None:
    """Kill all of a user's processes in one call: none of them can fork in between."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def descendants() -> list[int]:
    """Return the processes below this one (Linux)."""
    if not LINUX:
        return []
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def resident() -> int:
    """Return the bytes of memory that this process's descendants hold (Linux)."""
    pages = 0
    for pid in descendants():
        with suppress(OSError), open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def space(paths: list[str], enough: int) -> int:
    """Return the bytes of files, including holes, and folders; each counts at least 4096."""
    total, waiting = 0, list(paths)
    while waiting and total <= enough:
        path = waiting.pop()
        with suppress(OSError):
            total += max(4096, os.lstat(path).st_size)
            if os.path.isdir(path) and not os.path.islink(path):
                with os.scandir(path) as entries:
                    waiting += [entry.path for entry in entries]
    return total


if __name__ == "__main__":
    main()
