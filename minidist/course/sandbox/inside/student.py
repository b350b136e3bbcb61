"""The process of the student's code: takes its limits, then answers one call after the other.

A call is a file CALLS/<number>, pickled by the grader; a byte in a pipe says that it is there. The
answer is a file SCRATCH/<number>: what the function returned, or the text of an error, see
values.py. Shortly before the time is up the process writes SCRATCH/place: the lines of the
student's code that it is executing.
"""

import ctypes
import errno
import importlib
import itertools
import linecache
import os
import pickle
import re
import resource
import signal
import struct
import sys
import traceback
from contextlib import suppress

NO_NEW_PRIVS, DEATH_SIGNAL, SECCOMP = 38, 1, 22
# By machine, the numbers that the kernel's headers give: the machine itself, clone, and then
# memfd_create, memfd_secret, shmget, msgget, unshare. clone3 has one number on all.
CALLS = {
    "x86_64": (0xC000003E, 56, (319, 447, 29, 68, 272)),
    "aarch64": (0xC00000B7, 220, (279, 447, 194, 186, 97)),
}
CLONE3, NEW_USER, OTHER_ABI = 435, 0x10000000, 0x40000000
IN_FOLDERS = re.compile(r".*-packages/|/proc/self/fd/\d+/")  # where a dependency is imported from


HERE = os.path.dirname(os.path.abspath(__file__))  # whose lines are no student's business


def load(modules: list[str], folders: list[str]) -> None:
    """Import the dependencies and values.py, so that each student's process has them at once."""
    path = list(sys.path)
    sys.path += [*folders, HERE]
    for name in [*modules, "values"]:
        importlib.import_module(name)
    sys.path[:] = path


def main(order: dict, calls: int, heard: int) -> None:
    """Answer calls until their pipe ends; write to `heard` before the first, and after each."""
    sys.path.insert(0, order["tree"])
    sys.argv[:] = [""]
    os.environ.update(HOME=order["scratch"], TMPDIR=order["scratch"])
    os.environ.pop("PYTHONHOME", None)
    os.chdir(order["scratch"])
    signal.signal(signal.SIGALRM, lambda *_: note_place(order))
    confine(order)
    os.write(heard, b"1")
    for number in itertools.count():
        if not os.read(calls, 1):
            return
        answer(order, number)
        sys.stdout.flush()
        os.write(heard, b"1")


def confine(order: dict) -> None:
    """Become the student's user, if there is one; set the kernel's limits, also of children."""
    if order["user"] is not None:
        os.setgroups([])
        os.setgid(order["user"])
        os.setuid(order["user"])
    limits = {
        resource.RLIMIT_CPU: 2 * int(order["seconds"] + 1),
        resource.RLIMIT_AS: order["memory"],
        resource.RLIMIT_FSIZE: order["disk"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if order["processes"] is not None:
        limits[resource.RLIMIT_NPROC] = order["processes"]
    for kind, value in limits.items():
        with suppress(ValueError, OSError):  # the user's own limit is lower, or there is none such
            resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(DEATH_SIGNAL, 9, 0, 0, 0)
        refuse_hidden_memory(libc)


def refuse_hidden_memory(libc) -> None:
    """Have the kernel refuse the calls that make memory of no process (Linux, seccomp).

    They are files without a name, System V's segments and queues, and a user namespace, whose root
    can mount a file system of memory. Each test of a number jumps over a refusal, or to it.
    """
    if os.uname().machine not in CALLS:
        return
    machine, clone, calls = CALLS[os.uname().machine]
    load, equal, at_least, has_bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    lines = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, refuse)]
    lines += [(load, 0, 0, 0), (at_least, 0, 1, OTHER_ABI), (end, 0, 0, refuse)]
    for call in calls:
        lines += [(equal, 0, 1, call), (end, 0, 0, refuse)]
    lines += [(equal, 0, 1, CLONE3), (end, 0, 0, unknown)]  # the C library then calls clone
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16)]  # its flags
    lines += [(has_bits, 0, 1, NEW_USER), (end, 0, 0, refuse), (end, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    libc.prctl(SECCOMP, 2, ctypes.c_char_p(program), 0, 0)


def answer(order: dict, number: int) -> None:
    """Make a call; write what it returns to a file, or the error."""
    import values  # type: ignore[import-not-found]  # which `load` has imported, after NumPy

    with open(f"{order['calls']}/{number}", "rb") as file:
        module, name, arguments, named, seconds = pickle.load(file)
    signal.setitimer(signal.ITIMER_REAL, max(seconds - 1, seconds / 2))
    try:
        function = getattr(importlib.import_module(module), name)
        found = values.encode({"answer": function(*arguments, **named)})
    except BaseException as error:
        found = values.encode({"error": failure(error, order["tree"], order["files"])})
    path = f"{order['scratch']}/{number}"
    with open(f"{path}.part", "wb") as file:
        file.write(found)
    os.rename(f"{path}.part", path)  # all of it, or nothing


def note_place(order: dict) -> None:
    """Write down which lines of the student's files the threads execute; they go on."""
    with suppress(Exception), open(f"{order['scratch']}/place", "w") as file:
        file.write("\n".join(places(order["tree"], order["files"])))


def places(tree: str, theirs: list[str]) -> list[str]:
    """Return, per thread, the innermost line of the student's files that it executes."""
    found: dict[str, None] = {}
    for frame in sys._current_frames().values():
        stack = shown(reversed(list(traceback.walk_stack(frame))), tree)
        own = [f"{at}\n    {line}" for name, at, line in stack if name in theirs]
        found |= dict.fromkeys(own[-1:])
    return list(found)


def failure(error: BaseException, tree: str, theirs: list[str]) -> str:
    """Return the error and its places: the student's lines, and what they called last."""
    try:
        head, cause = [], error.__cause__
        if type(error).__name__ == "RankFailed" and cause is not None and cause.__traceback__:
            head, error = [f"rank {vars(error)['rank']} failed:"], cause  # what that rank raised
        frames = shown(traceback.walk_tb(error.__traceback__), tree)
        if isinstance(error, NotImplementedError):
            where = [at for name, at, _ in frames if name in theirs][-1:]
            return "\n".join([*where, f"NotImplementedError: {error}"[:200]])
        own = [frame for frame in frames if frame[0] in theirs]
        after = list(itertools.takewhile(lambda frame: frame[0] not in theirs, reversed(frames)))
        if type(error).__module__ == "minidist.errors" or isinstance(error, SyntaxError):
            after = []  # it says itself where it happened
        both = [*own[-4:], *reversed(after[:2])]
        kept = [f"{at}\n    {line}" if line else at for _, at, line in both]
        lines = [*head, *kept, "".join(traceback.format_exception_only(error)).rstrip()]
        if type(error).__name__ == "CommTimeout":
            lines += places(tree, theirs)[:4]
        lines = "\n".join(lines).splitlines()
        lines = lines if len(lines) <= 20 else [*lines[:8], "...", *lines[-12:]]
        message = "\n".join(lines).replace(f"{tree}/minidist/", "").replace(f"{tree}/", "")
        return message[-4000:]
    except BaseException:
        return f"{type(error).__name__}, which cannot be shown"


def shown(stack, tree: str) -> list[tuple[str, str, str]]:
    """Return (file, where, line of the source or "") of a stack's frames, but importlib's, ours."""
    found = []
    for frame, number in stack:
        code = frame.f_code
        name = IN_FOLDERS.sub("", code.co_filename.removeprefix(f"{tree}/minidist/"))
        if not name.startswith(("<frozen ", HERE)):
            line = linecache.getline(code.co_filename, number or 0).strip()  # between lines: None
            found.append((name, f"{name}, line {number}, in {code.co_qualname}", line))
    return found
