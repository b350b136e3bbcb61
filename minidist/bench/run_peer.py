"""Run a peer in separate processes, to compare its numbers with ours.

If a peer is missing, crashes, hangs or prints something else, only its own rows get a note; the run
goes on. An answer is {workload: seconds}, or the reason in words why there is none.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

from minidist.bench.rows import Answer

TIMEOUT = 120  # seconds for one answer
COMPILING = 10  # as many times as long for a peer that compiles its work first


class Peer:
    """A command that prints its times as JSON; `peer()` runs it and returns the answer.

    A peer that has failed is not run again: it would cost every round its timeout.

    reason    why it cannot be run, or why it has failed
    patience  how many times TIMEOUT it has for an answer
    """

    def __init__(self, command: list[str], reason: str | None = None, patience: int = 1):
        self.command, self.reason, self.patience = command, reason, patience

    def __call__(self) -> Answer:
        seconds = self.patience * TIMEOUT
        try:
            return self.reason or printed_by(self.command, seconds)
        except subprocess.TimeoutExpired:
            self.reason = f"no answer within {seconds:g} s"
        except (OSError, RuntimeError) as error:
            self.reason = f"failed: {_last_line(str(error))}"
        return self.reason


def torch_peer(*work: str, compiles: bool = False) -> Peer:
    """Return the peer that runs this work of `torch_peers.py`; whether it compiles it first."""
    installed = importlib.util.find_spec("torch") is not None
    missing = None if installed else "PyTorch is not installed: pip install 'minidist[bench]'"
    command = [sys.executable, "-m", "minidist.bench.torch_peers", *work]
    return Peer(command, missing, COMPILING if compiles else 1)


def jax_peer(works: str) -> Peer:
    """Return the peer that runs these workloads of `jax_peers.py`."""
    installed = importlib.util.find_spec("jax") is not None
    missing = None if installed else "JAX is not installed: pip install jax"
    return Peer([sys.executable, "-m", "minidist.bench.jax_peers", works], missing, COMPILING)


def mpi_peer(size: int, work: str, package: str = "mpi4py") -> Peer:
    """Return the peer that runs this work of `mpi.py`, which needs a package."""
    missing = why_no_mpi()
    if missing is None and importlib.util.find_spec(package) is None:
        missing = f"{package} is not installed: see minidist/bench/README.md"
    return Peer(mpi_command(size, work), missing)


def mpi_command(size: int, work: str) -> list[str]:
    """Return the command that runs this work of `mpi.py` on ranks of MPI."""
    python = [sys.executable, "-m", "mpi4py", "-m", "minidist.bench.mpi", work]
    return [mpiexec() or "mpiexec", "-n", str(size), *python]  # an exception ends all ranks


def mpiexec() -> str | None:
    """Return the launcher that is beside this Python, or the one on the PATH, or None."""
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return shutil.which("mpiexec", path=os.pathsep.join(places))


def why_no_mpi() -> str | None:
    """Return what to install before ranks can be started under mpiexec; None if all is there."""
    missing = [] if mpiexec() else ["mpiexec (of MPICH)"]
    missing += [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    return f"{' and '.join(missing)} not found: pip install 'minidist[mpi]'" if missing else None


def printed_by(command: list[str], timeout: float | None = None) -> dict:
    """Run a command; return the JSON object in its last line, or raise RuntimeError.

    After `timeout` seconds, by default TIMEOUT, or Ctrl-C, all its processes are ended. An error
    holds all the command's own words, with the traceback.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout or TIMEOUT)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}\n{errors}")
    line = output.strip().rpartition("\n")[2]
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise RuntimeError(f"its last line is no JSON object: {_last_line(line, 150)!r}") from None


def _last_line(text: str, most: int = 200) -> str:
    line = text.strip().rpartition("\n")[2].strip()
    return line if len(line) <= most else line[: most - 3] + "..."
