"""The supervisor's process, as the grader sees it: it is started, asked and stopped here."""

import contextlib
import functools
import importlib.util
import json
import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

from minidist.course.sandbox import bubblewrap
from minidist.course.sandbox.limits import LINUX
from minidist.course.sandbox.untrusted import beginning

INSIDE = Path(__file__).with_name("inside")
PYTHON = str(Path(sys.executable).resolve())
DEPENDENCIES = ["numpy", "cloudpickle", "threadpoolctl", "tqdm", "safetensors"]


def variables() -> dict[str, str]:
    """Return the few variables that the student's process gets; BLAS has one thread."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = [f"{name}_NUM_THREADS" for name in ("OPENBLAS", "OMP", "MKL")]
    threads.append("VECLIB_MAXIMUM_THREADS")
    own = {"MALLOC_ARENA_MAX": "2", "PATH": "/usr/bin:/bin"}
    return {**kept, **dict.fromkeys(threads, "1"), **own}


@functools.cache
def folders() -> tuple[str, ...]:
    """Return the folders that the dependencies are imported from."""
    specs = [importlib.util.find_spec(name) for name in DEPENDENCIES]
    found = [spec.submodule_search_locations or [spec.origin or ""] for spec in specs if spec]
    return tuple(sorted({str(Path(path).parent) for paths in found for path in paths}))


class Supervisor:
    """A process that runs the student's processes, in bubblewrap where it works.

    folder    what it may read; folder/asked: what the student's processes may write to
    user      whom they run as; None: the grading user
    defences  what the machine has of them, and what is therefore not prevented
    """

    def __init__(self, folder: Path, user: int | None):
        root = user is not None
        self._problems = folder / "supervisor"
        command = [PYTHON, "-s", "-P", "-S", "-B", "-X", "utf8", str(INSIDE)]
        environment, imported = variables(), list(folders())
        opened: list[int] = []
        why_not = bubblewrap.why_not(root, folders())
        if why_not is None:
            readable = [*imported, str(INSIDE), str(folder)]
            command = bubblewrap.wrapped(command, root, readable, [str(folder / "asked")])
        elif root and LINUX:
            # Python may be in a folder that is closed to this user, as /root is. Whoever has a
            # folder open can enter it as /proc/self/fd/N.
            opened = [os.open(path, os.O_RDONLY) for path in (sys.base_prefix, *imported)]
            home, *imported = [f"/proc/self/fd/{number}" for number in opened]
            environment["PYTHONHOME"] = home
        self._start(command, environment, opened)
        alone = root and why_not is not None
        try:
            order = {"modules": DEPENDENCIES, "folders": imported, "alone": alone}
            no_network = self.ask(order, 60)["no network"]
        except (OSError, ValueError) as error:
            self.stop()
            why = beginning(self._problems) or error
            raise RuntimeError(f"the sandbox does not start: {why}") from None
        self.defences = defences(user, why_not, no_network)

    def _start(self, command: list[str], environment: dict[str, str], opened: list[int]) -> None:
        with self._problems.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is the grader's, who then ends the supervisor
                cwd="/",
                env=environment,
                pass_fds=opened,
            )
        for number in opened:
            os.close(number)
        assert self._process.stdin and self._process.stdout
        self._orders, self._results = self._process.stdin, self._process.stdout

    def ask(self, order: dict, seconds: float) -> dict:
        """Send an order, return its result. OSError, ValueError: it has ended, or is too late."""
        self._orders.write(pickle.dumps(order))
        self._orders.flush()
        if not select.select([self._results], [], [], seconds)[0]:
            raise OSError(f"no answer in {seconds:g} s")
        return json.loads(self._results.readline())

    def stop(self) -> None:
        """End its input: it then ends the student's processes, and itself."""
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._results.close()


def defences(user: int | None, why_not: str | None, no_network: bool) -> str:
    """Return in one line what the student's code is confined by, and what is not prevented."""
    used = ["limits"] if user is None else [f"user {user}", "limits"]
    if why_not is None:
        return ", ".join(["bubblewrap", *used])
    able = ["to read, write and end what the grading user can"]
    if user is not None:
        able = ["to read and write what all users can"]
    if no_network:
        used.append("no network")
    else:
        able.append("to use the network")
    not_prevented = f"so the student's code is able {', '.join(able)}"
    return f"{', '.join(used)}; no bubblewrap ({why_not}), {not_prevented}"
