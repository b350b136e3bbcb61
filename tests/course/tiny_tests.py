"""The tests of the lab for tests, and what else runs beside the student's code."""

import ctypes
import os
import resource
import signal
import socket
import sys
import threading

import numpy as np
import pytest

from minidist.course.inside import inside, task
from minidist.pipeline_parallel import programs


@inside
def order(schedule, p, m):
    """Return each rank's actions, as they print."""
    return [{"the program": [str(a) for a in program]} for program in programs(schedule, p, m)]


@task("9.1")
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gpipe(p, rng):
    order.check("gpipe", p, int(rng.integers(3, 9)))


@task("9.2")
@pytest.mark.parametrize("p", [1, 2, 3])
def test_1f1b(p, rng):
    order.check("1f1b", p, int(rng.integers(3, 9)))


@inside
def echo(**given):
    """Return what is given."""
    return {name: np.array(value) for name, value in given.items()}


@inside
def misuse(how):
    """Return something else than named arrays of numbers, or nothing."""
    if how == "object":
        return {"x": np.array([object()])}
    if how == "complex":
        return {"x": 1 + 2j}
    if how == "structured":
        return {"x": np.zeros(2, "f4,i4")}
    if how == "a function":
        return print
    if how == "large":
        return {"x": np.zeros(1 << 22)}
    raise KeyboardInterrupt


@inside
def surroundings():
    """Return what the student's code finds around it."""
    return {
        "path": np.array(sys.path),
        "environment": np.array(sorted(os.environ)),
        "folder": np.array(os.getcwd()),
        "descriptors": np.array([n for n in range(256) if is_open(n)]),
        "threads": np.array(threading.active_count()),
        "limits": np.array([resource.getrlimit(limit) for limit in LIMITS]),
        "ends with the supervisor": np.array(death_signal()),
        "network": np.array(os.stat("/proc/self/ns/net").st_ino if LINUX else 0),
        "user": np.array([*os.getresuid(), *os.getresgid(), *os.getgroups()]),
        "course": np.array([name for name in sys.modules if name.startswith("minidist.course.")]),
    }


LINUX = sys.platform == "linux"
LIMITS = [
    getattr(resource, f"RLIMIT_{name}")
    for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE", "NPROC")
]


def death_signal():
    """Return the signal that comes when the parent ends (Linux)."""
    found = ctypes.c_int()
    if LINUX:
        ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)
    return found.value


def is_open(descriptor):
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


@inside
def tries(readable, writable, port):
    """Return {what: the error that it met, or "done"}."""
    attempts = {
        "connect": lambda: socket.create_connection(("127.0.0.1", port), 1).close(),
        "own file": lambda: open("own", "w").close(),
        "nothing": lambda: open(os.devnull, "w").close(),
        "signal": lambda: os.kill(os.getppid(), signal.SIGKILL),
        **{f"read {path}": lambda path=path: os.listdir(path) for path in readable},
        **{f"write {path}": lambda path=path: open(f"{path}/x", "w") for path in writable},
    }
    return {name: np.array(attempt_of(attempt)) for name, attempt in attempts.items()}


@inside
def hidden_memory(clone):
    """Return how far each way goes to memory that no process is counted for."""
    libc, new_user, child = ctypes.CDLL(None, use_errno=True), 0x10000000, 17  # SIGCHLD
    flags = (ctypes.c_uint64 * 11)(new_user, 0, 0, 0, child)
    attempts = {
        "file": lambda: os.close(os.memfd_create("x")),
        "segment": lambda: call(libc.shmget, 0, 1 << 20, 0o1600),
        "queue": lambda: call(libc.msgget, 0, 0o600),
        "namespace": lambda: call(libc.unshare, new_user),
        "child's namespace": lambda: call(libc.syscall, clone, new_user | child, 0, 0, 0, 0),
        "the same by clone3": lambda: call(libc.syscall, 435, flags, 88),
        "fork": lambda: os.waitpid(os.fork() or os._exit(0), 0),
    }
    return {name: np.array(attempt_of(attempt)) for name, attempt in attempts.items()}


def call(function, *arguments):
    """Call the C library; a child that it makes ends at once."""
    if (found := function(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), "")
    if function.__name__ == "syscall" and found == 0:
        os._exit(0)


def attempt_of(attempt):
    try:
        attempt()
        return "done"
    except OSError as error:
        return type(error).__name__
