"""The process of the student's code: gives up its rights, then answers the questions.

An answer is a file SCRATCH/<number>: a line of JSON, [[name, dtype, shape], ...] or the text of an
error, and then the bytes of the arrays, one after the other. Shortly before the time is up the
process writes SCRATCH/place: the lines of the student's code that it is executing.
"""

import ctypes
import importlib
import itertools
import json
import linecache
import os
import pickle
import resource
import signal
import sys
import sysconfig
import traceback

import landlock
import seccomp

# Modules to import while the process may still read them: if Python is in a folder of root's, it
# cannot read them after it has become another user.
STANDARD = """
abc argparse array ast asyncio atexit base64 bisect builtins cmath codecs collections
collections.abc colorsys concurrent.futures contextlib contextvars copy copyreg csv ctypes
ctypes.util dataclasses datetime decimal difflib dis encodings.ascii encodings.idna
encodings.latin_1 encodings.utf_8_sig enum errno faulthandler fractions functools gc getpass glob
graphlib gzip hashlib heapq hmac html importlib.metadata importlib.resources importlib.util
inspect io itertools json keyword linecache locale logging marshal math mmap
multiprocessing.connection multiprocessing.forkserver multiprocessing.reduction
multiprocessing.resource_tracker multiprocessing.shared_memory multiprocessing.spawn
multiprocessing.util numbers operator os pathlib pickle pickletools platform pprint
pydoc_data.topics queue random re reprlib resource sched secrets select selectors shlex shutil
signal socket statistics string struct subprocess symtable sys tempfile textwrap threading time
timeit token tokenize tomllib traceback tracemalloc types typing unittest.mock uuid warnings
weakref zipfile zlib
""".split()
MODULES = ["numpy", "cloudpickle", "threadpoolctl", "tqdm"]
NUMPY = """numpy.fft numpy.lib.stride_tricks numpy.linalg numpy.random numpy.testing
numpy.typing""".split()
NO_NEW_PRIVS, DEATH_SIGNAL = 38, 1
NEW_NETWORK, NEW_IPC = 0x40000000, 0x08000000


def load(order: dict) -> None:
    """Import all modules that may be needed later, while they can still be read."""
    path = list(sys.path)
    sys.path += order["dependencies"]
    for name in [*MODULES, *NUMPY, *STANDARD]:
        try:
            importlib.import_module(name)
        except ImportError:  # another version of Python has others
            pass
    sys.path[:] = path


def main(order: dict, told: int) -> None:
    """Answer an order's questions; write the names of the active defences to `told`."""
    questions = pickle.loads(order["questions"])
    sys.path.insert(0, order["tree"])
    sys.argv[:] = [""]
    os.environ.update(HOME=order["scratch"], TMPDIR=order["scratch"])
    os.chdir(order["scratch"])
    signal.signal(signal.SIGALRM, lambda *_: note_place(order))
    signal.setitimer(signal.ITIMER_REAL, max(order["seconds"] - 1, order["seconds"] / 2))
    defences = confine(order)
    os.write(told, json.dumps(defences).encode())
    os.close(told)
    answer(questions, order)


def confine(order: dict) -> list[str]:
    """Give up all rights that the student's code does not need; return the active defences."""
    without, used = order["without"], []
    libc = ctypes.CDLL(None)
    linux = hasattr(libc, "prctl")
    if order["user"] is not None:
        if linux and libc.unshare(NEW_NETWORK | NEW_IPC) == 0:
            used.append("no network")
        os.setgroups([])
        os.setgid(order["user"])
        os.setuid(order["user"])
        used.append(f"user {order['user']}")
    limit(order)
    if linux:
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(DEATH_SIGNAL, 9, 0, 0, 0)
        if "landlock" not in without and (version := landlock.restrict(*paths(order))):
            used.append(f"Landlock {version}")
        if "seccomp" not in without and seccomp.restrict():
            used.append("seccomp")
    return [*used, "limits"]


def limit(order: dict) -> None:
    """Set the kernel's limits of this process and its children."""
    limits = {
        resource.RLIMIT_CPU: 2 * int(order["seconds"] + 1),
        resource.RLIMIT_AS: order["memory"],
        resource.RLIMIT_FSIZE: order["file"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if order["processes"] is not None:
        limits[resource.RLIMIT_NPROC] = order["processes"]
    for kind, value in limits.items():
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):  # the user's own limit is lower, or there is none such
            pass


def paths(order: dict) -> tuple[list[str], list[str]]:
    """Return the paths that may be read, and the paths that may be written to."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    others = [os.path.join(path, "site-packages") for path in standard]
    hidden = [*order["hidden"], *others]
    system = [
        *standard,
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        os.path.join(sys.base_prefix, "lib"),
    ]
    system += [
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/usr/share/zoneinfo",
        "/dev/urandom",
        "/proc/self",
    ]
    readable = [found for path in system for found in landlock.but(path, hidden)]
    return [*readable, *order["readable"], order["tree"]], [order["scratch"], "/dev/null"]


def answer(questions: list, order: dict) -> None:
    """Ask the questions one after the other; write each answer to a file, or the error."""
    for number, (module, probe, given) in enumerate(questions):
        try:
            said = encode(getattr(importlib.import_module(module), probe)(**given))
        except BaseException as error:
            said = json.dumps({"error": failure(error, order["tree"], order["files"])}).encode()
        with open(f"{order['scratch']}/{number}", "wb") as file:
            file.write(said)


def note_place(order: dict) -> None:
    """Write down which lines of the student's files the threads execute; they go on."""
    try:
        with open(f"{order['scratch']}/place", "w") as file:
            file.write("\n".join(places(order["tree"], order["files"])))
    except Exception:  # the code that it interrupts is not to see it
        pass


def places(tree: str, theirs: list[str]) -> list[str]:
    """Return, per thread, the innermost line of the student's files that it executes."""
    found = {}
    for frame in sys._current_frames().values():
        stack = shown(reversed(list(traceback.walk_stack(frame))), tree)
        own = [f"{at}\n    {line}" for name, at, line in stack if name in theirs]
        found |= dict.fromkeys(own[-1:])
    return list(found)


def encode(answer: dict) -> bytes:
    """Return arrays of numbers, truth values or text as a line of JSON and their bytes."""
    import numpy as np

    arrays = {str(name): np.asarray(value) for name, value in answer.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "biufU":
            said = f"of {array.dtype}: {answer[name]!r:.200}"
            if array.dtype == object and array.shape == () and array[()] is None:
                said = "None: is a `return` missing?"
            raise TypeError(f"{name} should be an array of numbers, and is {said}")
    head = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    return b"".join([json.dumps(head).encode(), b"\n", *(a.tobytes() for a in arrays.values())])


def failure(error: BaseException, tree: str, theirs: list[str]) -> str:
    """Return what was raised and where: the student's lines, and what they called last."""
    try:
        head = []
        if type(error).__name__ == "RankFailed" and error.__cause__.__traceback__:
            head, error = [f"rank {error.rank} failed:"], error.__cause__  # what that rank raised
        frames = shown(traceback.walk_tb(error.__traceback__), tree)
        if isinstance(error, NotImplementedError):
            where = [at for name, at, _ in frames if name in theirs][-1:]
            return "\n".join([*where, f"NotImplementedError: {error}"[:200]])
        own = [frame for frame in frames if frame[0] in theirs]
        after = list(itertools.takewhile(lambda frame: frame[0] not in theirs, reversed(frames)))
        if told(error) or isinstance(error, SyntaxError):  # it says itself where it happened
            after = []
        kept = [frame[1:] for frame in [*own[-4:], *reversed(after[:2])]]
        kept = [f"{at}\n    {line}" if line else at for at, line in kept]
        lines = [*head, *kept, "".join(traceback.format_exception_only(error)).rstrip()]
        if type(error).__name__ == "CommTimeout":
            lines += places(tree, theirs)[:4]
        lines = "\n".join(lines).splitlines()
        lines = lines if len(lines) <= 20 else [*lines[:8], "...", *lines[-12:]]
        said = "\n".join(lines).replace(f"{tree}/minidist/", "").replace(f"{tree}/", "")
        return said[-4000:]
    except BaseException:
        return f"{type(error).__name__}, which cannot be shown"


def told(error: BaseException) -> bool:
    """Return whether an error is one of minidist.errors, whose messages say where it happened."""
    return type(error).__module__ == "minidist.errors"


def shown(stack, tree: str) -> list[tuple[str, str, str]]:
    """Return (file, where, line of the source or "") of the frames of a stack.

    importlib's frames are left out. A line is "" if the file may not be read any more.
    """
    found = []
    for frame, number in stack:
        code = frame.f_code
        name = code.co_filename.removeprefix(f"{tree}/minidist/").rpartition("-packages/")[2]
        if not name.startswith("<frozen "):
            line = linecache.getline(code.co_filename, number or 0).strip()  # between lines: None
            found.append((name, f"{name}, line {number}, in {code.co_qualname}", line))
    return found
