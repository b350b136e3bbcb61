"""The mutant zoo: wrong implementations, each a small change of the reference, and what finds them.

A mutant is a file mutants/NAME.toml: three lines in words (what is wrong, where such a mistake was
really seen, what its user sees) and one or more changes, each a text that stands exactly once in a
file of the package, and what stands there instead.

A mutant must pass the tests of a single device, and be killed by a property test of the repository.
All mutants meet the same tests; only the order differs, by the family of strategies that the mutant
belongs to. What the killer says is the diagnosis: it comes from numbers alone (tools/causes/).
"""

import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minidist.course.overlay import PACKAGE

MUTANTS = Path(__file__).parent / "mutants"
ROOT = PACKAGE.parent  # of a checkout, where the tests are
WORDS = ("title", "seen", "symptom", "family")
LIMIT = 600.0  # seconds for all tests of one mutant

# Differentiation knows no ranks: what lies outside of these cannot change what they compute.
OF_ONE_DEVICE = ("autograd", "nn", "optim.py", "rng.py", "datasets.py", "backend.py")
SINGLE_DEVICE = [
    "tests/autograd",
    "tests/nn",
    *(f"tests/test_{name}.py" for name in ("optim", "rng", "datasets", "backend")),
]
EQUIVALENCE = "tests/tools/test_equivalence.py"
CERTIFICATE = f"{EQUIVALENCE}::test_every_strategy_keeps_its_promise"

# {family: (the strategies whose certificates come first, and then these tests)}
FAMILIES = {
    family: (strategies.split(), [f"tests/{folder}test_{name}.py" for name in names.split()])
    for family, strategies, folder, names in (
        ("data parallelism", "naive bucketed", "data_parallel/", "naive bucketed"),
        ("ZeRO", "zero_1 zero_2 zero_3", "data_parallel/", "zero_memory zero"),
        (
            "parameter server",
            "parameter_server downpour ssp",
            "data_parallel/",
            "parameter_server sparse_update",
        ),
        ("branches", "siamese", "pipeline_parallel/", "branch_placement"),
        (
            "pipeline",
            "layer_split gpipe 1f1b interleaved",
            "pipeline_parallel/",
            "programs executor pipeline equivalence memory",
        ),
        ("zero bubble", "zb_h1 zb_h2 zb_v", "pipeline_parallel/", "zero_bubble validate"),
        ("PipeDream", "pipedream pipedream_2bw", "pipeline_parallel/", "pipedream"),
        (
            "matrices",
            "column row attention vocab",
            "tensor_parallel/",
            "column_parallel row_parallel vocab_parallel parallel_transformer",
        ),
        ("sequence", "sequence", "tensor_parallel/", "parallel_transformer"),
        ("hybrid", "hybrid", "", "hybrid"),
        ("communication", "", "comm/", "collectives group scatter_and_gather"),
        ("collective functions", "", "", "collective_functions"),
    )
}
# Overlap and speed: what a busy machine can change, and says nothing of right or wrong.
TIMING = [
    "data_parallel/test_bucketed.py::test_the_first_bucket_is_under_way",
    "data_parallel/test_zero_memory.py::test_weights_come_while_the_layer_before",
    "data_parallel/test_parameter_server.py::test_with_a_slow_worker",
    "data_parallel/test_parameter_server.py::test_a_bound_keeps_fast_workers_near",
]
PROPERTIES = [
    EQUIVALENCE,
    *dict.fromkeys(test for _, tests in FAMILIES.values() for test in tests),
]


@dataclass(frozen=True)
class Change:
    """In a file of the package, `replace`, which stands there once, becomes `by`."""

    file: str
    replace: str
    by: str


@dataclass(frozen=True)
class Mutant:
    """title, seen, symptom: one line each; family: a key of FAMILIES."""

    name: str
    title: str
    seen: str
    symptom: str
    family: str
    changes: list[Change] = field(default_factory=list)

    def files(self) -> dict[str, str]:
        """Return {path in the package: mutated source}. ValueError: a change does not apply."""
        found: dict[str, str] = {}
        for change in self.changes:
            if not (PACKAGE / change.file).is_file():
                raise ValueError(f"mutant {self.name}: minidist has no {change.file}")
            source = found.get(change.file) or _source(change.file)
            if (times := source.count(change.replace)) != 1:
                raise ValueError(
                    f"mutant {self.name}: {change.replace.strip()!r} stands {times} times in "
                    f"{change.file}, not once; make its text that of the reference again"
                )
            found[change.file] = source.replace(change.replace, change.by)
        return found

    def diff(self) -> str:
        """Return the mutant as a unified diff of the reference."""
        lines = []
        for path, source in self.files().items():
            before, after = _source(path).splitlines(True), source.splitlines(True)
            lines += difflib.unified_diff(before, after, f"a/minidist/{path}", f"b/minidist/{path}")
        return "".join(lines)

    def batches(self) -> list[list[str]]:
        """Return what it meets, one batch after the other; the first failure ends it."""
        strategies, own = FAMILIES[self.family]
        single = [] if self.why_single_device_tests_pass() else SINGLE_DEVICE
        first = [f"{CERTIFICATE}[{name}]" for name in strategies]
        mirrors = {f"test_{Path(change.file).stem}.py" for change in self.changes}
        own = sorted(own, key=lambda test: Path(test).name not in mirrors)
        others = [test for test in PROPERTIES if test not in own]
        return [batch for batch in (single, first, own, others) if batch]

    def why_single_device_tests_pass(self) -> str | None:
        """Return why they need not be run; None if they must be."""
        files = sorted({change.file for change in self.changes})
        if any(path.split("/")[0] in OF_ONE_DEVICE for path in files):
            return None
        return f"nothing that knows no ranks imports {', '.join(files)}"


def _source(path: str) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


def names() -> list[str]:
    return sorted(path.stem for path in MUTANTS.glob("*.toml"))


def load(name: str) -> Mutant:
    """Read a mutant. ValueError: there is none of that name, or it is not complete."""
    path = MUTANTS / f"{name}.toml"
    if name not in names():
        raise ValueError(f"there is no mutant {name!r}; there are {', '.join(names())}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name} is no TOML: {error}") from None
    for word in WORDS:
        if not isinstance(table.get(word), str) or len(table[word].splitlines()) != 1:
            raise ValueError(f"{path.name} needs a line {word!r}")
    if table["family"] not in FAMILIES:
        raise ValueError(f"{path.name}: family is one of {', '.join(FAMILIES)}")
    try:
        changes = [Change(**change) for change in table["change"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: a [[change]] has file, replace and by; {error}") from None
    mutant = Mutant(name, *(table[word] for word in WORDS), changes)
    mutant.files()
    return mutant


class Run:
    """Tests that run against a mutant: batch after batch, each in a process of its own.

    ended  whether a test has failed, or there are no more, or the time is over
    """

    def __init__(self, mutant: Mutant, batches: list[list[str]], limit: float = LIMIT):
        self.mutant, self.ahead, self.limit = mutant, list(batches), limit
        self.killer = self.diagnosis = None
        self.holder = tempfile.TemporaryDirectory(prefix="minidist-mutant-")
        self.folder = Path(self.holder.name)
        for path, source in mutant.files().items():
            place = self.folder / "minidist" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(source, encoding="utf-8")
        (self.folder / "tmp").mkdir()
        self.begin = time.monotonic()
        self._start()

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
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            for kind in ("failure", "error"):
                if (found := case.find(kind)) is not None:
                    return f"{case.get('file')}::{case.get('name')}", told(found)
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


def told(failure: ElementTree.Element) -> str:
    """Return what a failing test says in words: without Python's repetition of the assertion."""
    message, text = failure.get("message", ""), failure.text or ""
    if "ExceptionGroup" in message.partition(":")[0]:  # several failures: what each one says
        said = re.findall(r"(?:AssertionError|Failed): (\S.*)", text)
        message = "\n".join(dict.fromkeys(said)) or message
    if re.match(r"[\w.]*RankFailed", message):  # what the rank raised is the end of its traceback
        raised = re.findall(r"^E\s+([\w.]+(?:Error|Warning|Failed)\b.*)", text, re.M)
        message = f"{message.splitlines()[0]} {raised[-1]}" if raised else message
    message = re.sub(r"^(AssertionError: |Failed: )", "", message)
    kept = []
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
    ahead, runs = list(reversed(mutants)), []
    try:
        while ahead or runs:
            while ahead and len(runs) < at_once:
                mutant = ahead.pop()
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
