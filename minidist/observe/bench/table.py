"""What `minidist bench` prints: contestants take turns, a row compares two of them.

A round is {contestant: {workload: seconds}}; where a contestant has no times it is the reason in
words. All contestants take turns within a round, so that a slow moment of the machine affects all;
a ratio is the median over rounds of the ratios within a round. A peer runs in a separate process:
if it is missing, crashes, hangs or prints something else, only its own rows get a note.

    minidist bench step --rounds 9 --json > rows.json
    python -m minidist.observe.bench.table < rows.json         # the table of README.md
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import groupby

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.events import Clock
from minidist.observe.step_parts import median_seconds

Step = Callable[[], object]
Works = Mapping[str, Callable[[], Step]]  # {workload: what prepares a call}
Times = dict[str, float]
Answer = Times | str
SETTLE = 0.3  # seconds; threads that BLAS starts in each process spin at first
FORM = "{:<39}{:<4}{:>12} {:<14}{:>11}{:>7}{:>7}  {}"
NUMBERS = {"ours_ms": "{:.3f} ms", "peer_ms": "{:.3f} ms", "ratio": "{:.2f}", "limit": "{:.2f}"}


def times_of(
    works: Works,
    meet: Step = lambda: None,
    repeats: int = 5,
    clock: Callable[[], Clock] = Clock,
) -> Times:
    """Return the median seconds of a call of each workload, on one BLAS thread.

    Each is prepared when the one before has gone, with its memory.
    """
    time.sleep(SETTLE)
    with threadpool_limits(1):
        return {
            name: median_seconds(make(), meet, repeats, clock()) for name, make in works.items()
        }


def slowest(ranks: list[Times]) -> Times:
    """Return each workload's longest time over the ranks."""
    return {name: max(times[name] for times in ranks) for name in ranks[0]}


class Rounds(list[Mapping[str, Answer]]):
    """What the contestants have answered, round by round."""

    def seconds(self, contestant: str, workload: str) -> np.ndarray:
        """Return a contestant's seconds per round; it has them in all."""
        answers = [one[contestant] for one in self]
        return np.array([answer[workload] for answer in answers if not isinstance(answer, str)])

    def row(
        self,
        name: str,
        workload: str,
        peer: str = "",
        limit: float | None = None,
        theirs: str = "",
        note: str = "",
    ) -> dict:
        """Return our time of a workload beside a peer's.

        limit   the largest ratio of ours over theirs that is allowed
        theirs  the peer's name of the workload, where it has another
        """
        ours = self.seconds("ours", workload)
        row = remark(name, note) | {"ours_ms": 1e3 * middle(ours), "peer": peer, "limit": limit}
        reasons = [answer for one in self if isinstance(answer := one.get(peer), str)]
        if reasons or not peer:
            return row | {"note": "; ".join(filter(None, [note, *reasons[:1]]))}
        others = self.seconds(peer, theirs or workload)
        return row | {"peer_ms": 1e3 * middle(others), "ratio": middle(ours / others)}


def rounds_of(rounds: int, **contestants: Callable[[], Answer]) -> Rounds:
    """Ask all contestants for their times, one after the other, in each round."""
    return Rounds({name: ask() for name, ask in contestants.items()} for _ in range(rounds))


def middle(per_round: np.ndarray) -> float:
    return float(np.median(per_round))


def remark(name: str, note: str) -> dict:
    """Return a row without numbers."""
    row: dict = {"name": name, "processor": "CPU", "ours_ms": None, "peer": "", "peer_ms": None}
    return row | {"ratio": None, "limit": None, "note": note}


def head(title: str) -> str:
    return FORM.format(title, "on", "minidist", "peer", "", "ratio", "limit", "").rstrip()


def line(row: dict) -> str:
    """Return a row for people; what it has not stays empty."""
    cells = ["" if x is None else NUMBERS.get(key, "{}").format(x) for key, x in row.items()]
    return FORM.format(*cells).rstrip()


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


MISSING = {
    "torch": "PyTorch is not installed: pip install 'minidist[bench]'",
    "jax": "JAX is not installed: pip install jax",
    "numpitron": "numpitron is not installed: see minidist/observe/bench/README.md",
}


def peer(package: str, *work: str, ranks: int = 0, compiles: bool = False) -> Peer:
    """Return the peer that runs this work of a package, in the file of that package.

    ranks     of mpiexec
    compiles  whether it compiles its work first
    """
    reason = why_no_mpi() if ranks else None
    if reason is None and importlib.util.find_spec(package) is None:
        reason = MISSING[package]
    return Peer(command(package, *work, ranks=ranks), reason, COMPILING if compiles else 1)


def command(package: str, *work: str, ranks: int = 0) -> list[str]:
    """Return the command that runs this work of a file here, on ranks of MPI if there are any."""
    file = {"torch": "torch_peers", "jax": "jax_peers"}.get(package, "mpi")
    python = ["-m", f"minidist.observe.bench.{file}", *work]
    if not ranks:
        return [sys.executable, *python]
    launcher = [mpiexec() or "mpiexec", "-n", str(ranks), sys.executable]
    return [*launcher, "-m", "mpi4py", *python]  # an exception ends all ranks


def mpiexec() -> str | None:
    """Return the launcher that is beside this Python, or the one on the PATH, or None."""
    places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return shutil.which("mpiexec", path=os.pathsep.join(places))


def why_no_mpi() -> str | None:
    """Return the remedy where ranks cannot be started under mpiexec; None where they can."""
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


PEERS = "PyTorch", "torch.compile", "JAX"
HEAD = "workload", "step", "products alone", "share", *PEERS, "peak"


def markdown(rows: list[dict]) -> str:
    """Return Markdown: a line per workload; beside a peer's time ours over it."""
    (machine, *_), *works = [list(same) for _, same in groupby(rows, key=lambda row: row["name"])]
    cells = [HEAD, ("---",) * len(HEAD), *map(_cells, works)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([f"Measured on {machine['note']}:", "", *lines])


def _cells(rows: list[dict]) -> tuple[str, ...]:
    """Return the cells of a workload; a dash where there is no number."""
    by_peer = {row["peer"]: row for row in rows}
    share = peak = alone = "-"
    if products := by_peer.get("products"):
        alone = _ms(products["peer_ms"])
        share, peak = (part.split(" ", 1)[1] for part in products["note"].split(", "))
    step = rows[0]["name"], _ms(rows[0]["ours_ms"])
    return *step, alone, share, *(_peer(by_peer.get(name)) for name in PEERS), peak


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1}f} ms"


def _peer(row: dict | None) -> str:
    if row is None or row["ratio"] is None:
        return "-"
    return f"{_ms(row['peer_ms'])}, {row['ratio']:.2f}"


if __name__ == "__main__":
    print(markdown(json.load(sys.stdin)))
