"""A program on real ranks: certified, measured, simulated, in a process that can be ended.

The process gets the program's text, which is data, and writes a line of JSON at every step. It
leads a session, so that one signal ends its ranks, too; its temporary files have their own folder.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

from minidist.errors import WrongInput
from minidist.events import EventLog
from minidist.observe.timeline.lines import kind
from minidist.pipeline_parallel import read
from minidist.pipeline_parallel.actions import Programs, last_stage, micro_batches_of
from minidist.pipeline_parallel.schedules import order_of

ROOT = Path(__file__).parents[3]  # where minidist is imported from
MOST = {"ranks": 8, "stages": 64, "actions": 5000}


def programs_of(text: str) -> Programs:
    """Return the programs of a text; ValueError if they are wrong, or too large to run here."""
    programs = read(f"{text}\n")  # with a line break it is no file's name
    sizes = len(programs), 1 + last_stage(programs.placement), sum(map(len, programs))
    for size, (unit, most) in zip(sizes, MOST.items(), strict=True):
        if size > most:
            raise WrongInput(f"{size:,} {unit} are too many to run here; use at most {most:,}")
    return order_of(programs, len(programs))


class RealRun:
    """A run that has started; its `status` is running, done, failed (with an error) or cancelled.

    ValueError: a program that is wrong or too large. `seconds`: the most that it may take.
    """

    def __init__(self, text: str, seconds: int = 120):
        programs_of(text)
        self.status: dict = {"state": "running", "progress": "ranks start", "fraction": 0.0}
        self._lock, self._cancelled = threading.Lock(), False
        self._folder = tempfile.mkdtemp(prefix="minidist-")  # short: it has sockets
        command, env = [sys.executable, "-m", __name__, str(seconds)], {"TMPDIR": self._folder}
        self.process = Popen(
            command, cwd=ROOT, env=os.environ | env, start_new_session=True, stdin=PIPE, stdout=PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(text).encode() + b"\n")
        self.process.stdin.flush()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        """Follow the process to its end; then end its ranks, and remove its files."""
        with self.process as process:
            for line in process.stdout or ():
                if line.endswith(b"\n"):  # else it was killed while it wrote
                    self.status = self.status | json.loads(line)
            with self._lock:  # afterwards its number may be another process's
                self._kill()
                code = process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self.status["fraction"] == 1.0:
            end: dict[str, str] = {"state": "done"}
        elif self._cancelled:
            end = {"state": "cancelled"}
        else:
            why = f"the run was ended from outside (status {code}); start it again"
            if code == -signal.SIGALRM:
                why = "the run took too long; use fewer micro-batches, or fewer ranks"
            end = {"state": "failed", "error": self.status.get("error", why)}
        self.status = self.status | end

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Cancel the run, unless it has ended; wait until nothing of it is left."""
        with self._lock:
            if self.process.returncode is None:
                self._cancelled = True
                self._kill()
        self._watcher.join()


def steps(programs: Programs) -> Iterator[dict]:
    """Certify a program, measure it, simulate it; yield what is new of the status."""
    from minidist.comm.local import limits  # the server does without NumPy
    from minidist.observe.measure_pipeline import measure_pipeline
    from minidist.verify import equivalence

    ranks, rows = len(programs), []
    for row in equivalence.verify_program(programs):
        rows.append(row)
        proved = equivalence.Certificate("the program", row["promise"], rows)
        verdict = f"On {ranks} processes every parameter of {len(rows)} models has one device's "
        verdict += f"gradient; the largest error is {max(r['error'] for r in rows):.1e}."
        verdict = verdict if proved.ok else repr(proved)
        yield {
            "certificate": {"ok": proved.ok, "words": verdict, "rows": rows},
            "progress": f"compared with one device: {row['case']}",
            "fraction": len(rows) / 8,
        }
    yield {"progress": "seven steps of the program, five of them measured"}
    real = measure_pipeline(programs, ranks, micro_batches_of(programs))
    outcome = f"measured {real.makespan * 1e3:.1f} ms, {real.ratio:.2f} times the simulated "
    outcome += "makespan"
    if ranks > (cores := limits.cores()):
        outcome += f"; {ranks} ranks share {cores} cores, which the simulation does not know"
    simulated = {"rows": _rows(real.simulation.timeline), "makespan": real.simulation.makespan}
    measured = {"rows": _rows(real.log), "makespan": real.makespan}
    yield {"measured": measured, "simulated": simulated, "ratio": real.ratio}
    yield {"progress": outcome, "fraction": 1.0}


def _rows(log: EventLog) -> list[list[dict]]:
    """Return the actions that each rank computes, with their starts and ends in seconds."""
    rows: list[list[dict]] = [[] for _ in range(1 + max(e.rank for e in log.events))]
    for e in (e for e in log.events if e.category == "compute"):
        rows[e.rank].append({"name": e.name, "kind": kind(e.name), "start": e.start, "end": e.end})
    return rows


def main() -> None:
    """Be the process of a run: read a program's text, write what becomes of it."""
    signal.alarm(int(sys.argv[1]))
    lines = os.fdopen(os.dup(1), "w", buffering=1)  # no child inherits it: it ends with this one
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    text = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    try:
        for status in steps(programs_of(text)):
            print(json.dumps(status), file=lines)
    except Exception as error:  # whatever it is, the page shows it
        print(json.dumps({"error": f"the run failed: {error!s}"}), file=lines)
        sys.exit(1)


def _end_with_the_server() -> None:
    """Wait for the end of the input, which the server keeps open; then leave nothing."""
    os.read(0, 1)  # without the lock of sys.stdin, for which an exit would wait
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
