"""Run a peer in separate processes, to compare its numbers with ours.

If a peer is missing, crashes, hangs or prints something else, only its own rows get a note; the run
goes on. An answer is {workload: seconds}, or the reason in words why there is none.
"""

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from numbers import Real

TIMEOUT = 120  # seconds for one answer
MODULE = "minidist.tools.bench.peers"

Answer = dict[str, float] | str


class Peer:
    """A command that prints its times as JSON; `peer()` runs it and returns the answer.

    A peer that has failed is not run again: it would cost every round its timeout.

    workloads  the names whose times the answer must hold
    missing    why it cannot be run at all, if it cannot
    """

    def __init__(self, command: list[str], workloads: Iterable[str], missing: str | None = None):
        self.command, self.workloads, self.reason = command, list(workloads), missing

    def __call__(self) -> Answer:
        if self.reason is not None:
            return self.reason
        answer = answer_of(self.command, self.workloads)
        self.reason = answer if isinstance(answer, str) else None
        return answer


def torch_peer(workloads: Iterable[str], *work: str) -> Peer:
    """Return the peer that runs this work of `peers.py` with PyTorch."""
    installed = importlib.util.find_spec("torch") is not None
    missing = None if installed else "PyTorch is not installed: pip install 'minidist[bench]'"
    return Peer([sys.executable, "-m", MODULE, *work], workloads, missing)


def mpi_peer(workloads: Iterable[str], size: int, work: str, package: str = "mpi4py") -> Peer:
    """Return the peer that runs this work of `peers.py`, which needs a package, on ranks of MPI."""
    missing = why_no_mpi()
    if missing is None and importlib.util.find_spec(package) is None:
        missing = f"{package} is not installed: see minidist/tools/bench/README.md"
    return Peer(mpi_command(size, work), workloads, missing)


def mpi_command(size: int, work: str) -> list[str]:
    """Return the command that runs this work of `peers.py` under mpiexec, which must be there."""
    python = [sys.executable, "-m", "mpi4py", "-m", MODULE]  # an exception ends all ranks
    return [mpiexec() or "mpiexec", "-n", str(size), *python, work]


def mpiexec() -> str | None:
    """Return the launcher that is beside this Python, or the one on the PATH, or None."""
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return shutil.which("mpiexec", path=os.pathsep.join(places))


def why_no_mpi() -> str | None:
    """Return what to install before ranks can be started under mpiexec; None if all is there."""
    missing = [] if mpiexec() else ["mpiexec (of MPICH)"]
    missing += [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    return f"{' and '.join(missing)} not found: pip install 'minidist[mpi]'" if missing else None


def answer_of(command: list[str], workloads: Iterable[str]) -> Answer:
    """Run a command whose last line is a JSON object; return it, or why that is no answer."""
    try:
        status, output, errors = _run(command, TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT:g} s"
    except OSError as error:
        return f"failed: {error}"
    if status:
        return f"failed: {_last_line(errors) or f'exit status {status}'}"
    try:
        found = json.loads(output.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return f"failed: its last line is no JSON object: {_last_line(output)!r}"
    if wrong := [name for name in workloads if not _is_time(found.get(name))]:
        return f"failed: its answer has no time of {wrong[0]!r}"
    return found


def answer_or_error(command: list[str]) -> dict:
    """Run a command of our own that prints JSON in its last line; return that, or raise an error.

    In it are all the command's own words, with the traceback.
    """
    status, output, errors = _run(command, TIMEOUT)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {status}:\n{errors}")
    return json.loads(output.strip().rpartition("\n")[2])


def why_not(answers: Iterable[Answer]) -> str:
    """Return why a peer has no number in some round; "" if it has all."""
    return next((answer for answer in answers if isinstance(answer, str)), "")


def _run(command: list[str], timeout: float) -> tuple[int, str, str]:
    """Return (exit status, output, errors); after `timeout` or Ctrl-C end all its processes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(
        command, **pipes, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors


def _last_line(text: str, most: int = 200) -> str:
    line = text.strip().rpartition("\n")[2].strip()
    return line if len(line) <= most else line[: most - 3] + "..."


def _is_time(given) -> bool:
    return isinstance(given, Real) and 0 < given < math.inf
