"""Run the tests of a checkout against mutants, several at a time, and say what killed each.

What the killer says is the diagnosis: it comes from numbers alone (verify/causes/).

A test that calls no function which a mutant changes passes, as it does without the change. So the
tests of a single device run once, on the reference, whose functions write down the tests that call
them. A mutant meets the tests that call its functions.
"""

import ast
import compileall
import re
import select
import shutil
import signal
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minidist.comm.local.limits import cores
from minidist.course.mutant_tests import SINGLE_DEVICE, TIMING
from minidist.course.mutants import WORDS, Mutant
from minidist.course.pytest_server import Server
from minidist.errors import WrongInput
from minidist.verify.mistakes.edits import functions
from minidist.verify.mistakes.overlay import PACKAGE, build
from minidist.verify.mistakes.register import source

ROOT = PACKAGE.parent  # of a checkout, where the tests are
LIMIT = 600.0  # seconds for all tests of one mutant
CALLS = "calls.txt"  # lines of function, tab, test
# Outside of a test, or in a rank that is a process, nobody knows the test: then this is an error.
WRITE_DOWN = """
assert __import__("multiprocessing").parent_process() is None
with open({file!r}, "a") as calls:
    print({function!r}, __import__("os").environ["PYTEST_CURRENT_TEST"], sep="\\t", file=calls)
"""


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
    """Tests that run against a package: batch after batch, each in a process of its own.

    mutant  None: the reference, whose functions write down calls
    folder  has the package
    """

    def __init__(
        self, mutant: Mutant | None, folder: Path, server: Server, batches: list[list[str]]
    ):
        self.mutant, self.folder, self.server, self.ahead = mutant, folder, server, list(batches)
        self.killer: str | None = None
        self.diagnosis: str | None = None
        (folder / "tmp").mkdir()
        self.begin = time.monotonic()
        self._start()

    def _start(self) -> None:
        options = ["-x", "-q", "-vv", "--tb=short", "-p", "no:cacheprovider", "--timeout=100"]
        options += [f"--impl={self.folder}", "-o", "junit_family=xunit1"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the server has hypothesis
        options += [f"--deselect=tests/{test}" for test in TIMING]
        options += [f"--junitxml={self.folder / 'report.xml'}", *self.ahead.pop(0)]
        self.server.start(self.folder / "output.txt", self.folder / "tmp", options)

    def ended(self, answered: bool) -> bool:
        """Return whether a test has failed, or there are no more, or the time is over.

        answered  whether a batch has ended; where it has ended well, the next one starts
        """
        if not answered:
            late = time.monotonic() - self.begin > LIMIT
            self.diagnosis = f"no verdict after {LIMIT:.0f} s" if late else None
            return late
        if status := self.server.status():
            self.killer, self.diagnosis = self._first_failure(status)
        elif self.ahead:
            self._start()
            return False
        return True

    def _first_failure(self, status: int) -> tuple[str, str]:
        report = self.folder / "report.xml"
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                for kind in ("failure", "error"):
                    if (found := case.find(kind)) is not None:
                        return f"{case.get('file')}::{case.get('name')}", failure_message(found)
        output = (self.folder / "output.txt").read_text()[-3000:]
        raise RuntimeError(f"pytest ended with {status}:\n{output}")

    def row(self) -> dict:
        assert self.mutant
        return {
            "name": self.mutant.name,
            "killed_by": self.killer,
            "diagnosis": self.diagnosis,
            "single_device": self.mutant.why_single_device_tests_pass() or "they pass",
            **{word: getattr(self.mutant, word) for word in WORDS},
            "seconds": round(time.monotonic() - self.begin, 1),
        }


class Runs:
    """The runs of a moment, their packages in a folder, and the servers that have none to do."""

    def __init__(self, folder: Path):
        self.folder, self.now, self.idle = folder, list[Run](), list[Server]()
        self.reference = build(folder / "reference", {})
        compileall.compile_dir(self.reference, quiet=1)  # once for all

    @_held_back()
    def start(self, mutant: Mutant | None, files: dict[str, str], batches: list[list[str]]) -> Run:
        name = mutant.name if mutant else "calls"
        package = build(self.folder / name, files, linked=self.reference)
        server = self.idle.pop() if self.idle else Server(ROOT)
        self.now.append(Run(mutant, package, server, batches))
        return self.now[-1]

    def ended(self) -> Iterator[Run]:
        """Wait for one, or a moment; yield those that have ended."""
        ready, _, _ = select.select([run.server.answers for run in self.now], [], [], 0.1)
        for run in list(self.now):
            if run.ended(run.server.answers in ready):
                yield run
                self.now.remove(run)
                if run.server.busy:  # its time is over
                    run.server.close()
                else:
                    self.idle.append(run.server)
                shutil.rmtree(run.folder, ignore_errors=True)

    def close(self) -> None:
        for server in (*self.idle, *(run.server for run in self.now)):
            server.close()


def failure_message(failure: ElementTree.Element) -> str:
    """Return what a failing test says in words: without Python's repetition of the assertion."""
    message, text = failure.get("message", ""), failure.text or ""
    if "ExceptionGroup" in message.partition(":")[0]:  # several failures: what each one says
        messages = re.findall(r"(?:AssertionError|Failed): (\S.*)", text)
        message = "\n".join(dict.fromkeys(messages)) or message
    if re.match(r"[\w.]*RankFailed", message):  # what the rank raised is the end of its traceback
        kinds = r"minidist\.[\w.]+:|[\w.]+(?:Error|Warning|Failed)\b"
        raised = re.findall(rf"^E\s+((?:{kinds}).*)", text, re.M)
        message = f"{message.splitlines()[0]} {raised[-1]}" if raised else message
    message = re.sub(r"^(AssertionError: |Failed: )", "", message)
    kept: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if kept and re.match(r"\s*(assert |\+ )", line):
            break
        kept.append(line.strip())
    return "\n".join(kept[:4])


def writing_down(mutants: list[Mutant], file: Path) -> dict[str, str]:
    """Return the files that mutants change, right but that their functions write down calls."""
    trees: dict[str, ast.Module] = {}
    for edit in dict.fromkeys(edit for mutant in mutants for edit in mutant.edits):
        tree = trees.setdefault(edit.path, ast.parse(source(edit.path)))
        function = functions(tree)[edit.name]
        line = WRITE_DOWN.format(file=str(file), function=f"{edit.path}:{edit.name}")
        after = 0 if ast.get_docstring(function) is None else 1
        function.body[after:after] = ast.parse(line).body
    return {path: ast.unparse(tree) for path, tree in trees.items()}


def callers(mutant: Mutant, file: Path) -> list[str]:
    """Return the tests that are written down as calling a function which a mutant changes."""
    changed = {f"{edit.path}:{edit.name}" for edit in mutant.edits}
    calls = [line.split("\t") for line in file.read_text().splitlines()]
    return list(dict.fromkeys(t.rpartition(" ")[0] for name, t in calls if name in changed))


def judge(
    mutants: list[Mutant], at_once: int | None = None, tests: list[str] | None = None
) -> Iterator[dict]:
    """Yield a row per mutant, as they end.

    A row has name, killed_by (a test, or None) and diagnosis, why single-device tests pass, the
    mutant's words, and the seconds that it took.

    at_once  how many run at a time; by default one more than cores, for tests wait for ranks
    tests    others than `Mutant.batches`, the same for all
    """
    if not (ROOT / "tests" / "conftest.py").is_file():
        raise WrongInput(f"mutants are judged by the tests of a checkout; {ROOT} has none")
    at_once = at_once or cores() + 1
    affected = [m for m in mutants if tests is None and not m.why_single_device_tests_pass()]
    ahead = [mutant for mutant in reversed(mutants) if mutant not in affected]
    with tempfile.TemporaryDirectory(prefix="minidist-mutants-") as folder:
        runs, calls = Runs(Path(folder)), Path(folder) / CALLS
        try:
            if affected:
                runs.start(None, writing_down(affected, calls), [SINGLE_DEVICE])
            while ahead or runs.now:
                while ahead and len(runs.now) < at_once:
                    mutant = ahead.pop()
                    single = callers(mutant, calls) if mutant in affected else []
                    batches = mutant.batches(single) if tests is None else [tests]
                    runs.start(mutant, mutant.files(), batches)
                for run in runs.ended():
                    if run.mutant:
                        yield run.row()
                    elif run.diagnosis:
                        raise RuntimeError(f"the reference: {run.killer}: {run.diagnosis}")
                    else:
                        ahead += affected
        finally:
            runs.close()


def text(row: dict, width: int, screen: int) -> str:
    """Return a row in words: the mutant, what killed it, and the diagnosis, folded to a screen."""
    lines = [
        wrapped
        for line in (row["diagnosis"] or "").splitlines()
        for wrapped in textwrap.wrap(line, screen - 4, subsequent_indent="  ")
    ]
    return "\n    ".join([f"{row['name']:<{width}}  {row['killed_by'] or 'SURVIVED'}", *lines])
