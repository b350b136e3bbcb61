"""Run the tests of a checkout against mutants, several at a time, and say what killed each.

What the killer says is the diagnosis: it comes from numbers alone (verify/causes/).
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minidist.course.mutant_tests import TIMING
from minidist.course.mutants import WORDS, Mutant
from minidist.mistakes.overlay import PACKAGE

ROOT = PACKAGE.parent  # of a checkout, where the tests are
LIMIT = 600.0  # seconds for all tests of one mutant


@contextmanager
def _held_back() -> Iterator[None]:
    """Let signals wait until this is done: no process is begun that nobody knows, and ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    kinds = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {kind: signal.signal(kind, lambda number, _: came.append(number)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        for number in came:
            signal.raise_signal(number)


class Run:
    """Tests that run against a mutant: batch after batch, each in a process of its own.

    ended  whether a test has failed, or there are no more, or the time is over
    """

    def __init__(self, mutant: Mutant, batches: list[list[str]], limit: float = LIMIT):
        self.mutant, self.ahead, self.limit = mutant, list(batches), limit
        self.killer: str | None = None
        self.diagnosis: str | None = None
        self.holder = tempfile.TemporaryDirectory(prefix="minidist-mutant-")
        self.folder = Path(self.holder.name)
        for path, source in mutant.files().items():
            place = self.folder / "minidist" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(source, encoding="utf-8")
        (self.folder / "tmp").mkdir()
        self.begin = time.monotonic()
        self._start()

    @_held_back()
    def _start(self) -> None:
        options = ["-x", "-q", "-vv", "--tb=short", "-p", "no:cacheprovider", "--timeout=100"]
        options += ["--impl", str(self.folder), "-o", "junit_family=xunit1"]
        options += [f"--deselect=tests/{test}" for test in TIMING]
        options += [f"--junitxml={self.folder / 'report.xml'}"]
        with open(self.folder / "output.txt", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *self.ahead.pop(0)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.folder / "tmp")},
                start_new_session=True,  # Ctrl-C is ours to pass on
            )

    @property
    def ended(self) -> bool:
        """Look how far it is; start the next batch where one has ended well."""
        if time.monotonic() - self.begin > self.limit:
            self.diagnosis = f"no verdict after {self.limit:.0f} s"
            return True
        if (code := self.process.poll()) is None:
            return False
        if code == 0 and self.ahead:
            self._start()
            return False
        if code != 0:
            self.killer, self.diagnosis = self._first_failure()
        return True

    def _first_failure(self) -> tuple[str, str]:
        report = self.folder / "report.xml"
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                for kind in ("failure", "error"):
                    if (found := case.find(kind)) is not None:
                        return f"{case.get('file')}::{case.get('name')}", failure_message(found)
        output = (self.folder / "output.txt").read_text()[-3000:]
        raise RuntimeError(f"pytest ended with {self.process.returncode}:\n{output}")

    def row(self) -> dict:
        return {
            "name": self.mutant.name,
            "killed_by": self.killer,
            "diagnosis": self.diagnosis,
            "single_device": self.mutant.why_single_device_tests_pass() or "they pass",
            **{word: getattr(self.mutant, word) for word in WORDS},
            "seconds": round(time.monotonic() - self.begin, 1),
        }

    def close(self) -> None:
        """End what still runs, all of it; remove the folder."""
        for number in (signal.SIGINT, signal.SIGKILL):  # at the first one pytest tidies up
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
        self.process.wait()
        self.holder.cleanup()


def failure_message(failure: ElementTree.Element) -> str:
    """Return what a failing test says in words: without Python's repetition of the assertion."""
    message, text = failure.get("message", ""), failure.text or ""
    if "ExceptionGroup" in message.partition(":")[0]:  # several failures: what each one says
        messages = re.findall(r"(?:AssertionError|Failed): (\S.*)", text)
        message = "\n".join(dict.fromkeys(messages)) or message
    if re.match(r"[\w.]*RankFailed", message):  # what the rank raised is the end of its traceback
        raised = re.findall(r"^E\s+([\w.]+(?:Error|Warning|Failed)\b.*)", text, re.M)
        message = f"{message.splitlines()[0]} {raised[-1]}" if raised else message
    message = re.sub(r"^(AssertionError: |Failed: )", "", message)
    kept: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if kept and re.match(r"\s*(assert |\+ )", line):
            break
        kept.append(line.strip())
    return "\n".join(kept[:4])


def judge(
    mutants: list[Mutant], at_once: int = 2, tests: list[str] | None = None
) -> Iterator[dict]:
    """Yield a row per mutant, as they end; so many run at a time.

    A row has name, killed_by (a test, or None) and diagnosis, why single-device tests pass, the
    mutant's words, and the seconds that it took.

    tests  others than `Mutant.batches`, the same for all
    """
    if not (ROOT / "tests" / "conftest.py").is_file():
        raise ValueError(f"mutants are judged by the tests of a checkout; {ROOT} has none")
    ahead = list(reversed(mutants))
    runs: list[Run] = []
    try:
        while ahead or runs:
            while ahead and len(runs) < at_once:
                mutant = ahead.pop()
                with _held_back():
                    runs.append(Run(mutant, mutant.batches() if tests is None else [tests]))
            time.sleep(0.05)
            for run in [run for run in runs if run.ended]:
                row = run.row()
                run.close()
                runs.remove(run)
                yield row
    finally:
        for run in runs:
            run.close()
