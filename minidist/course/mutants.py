"""The mutants: mistakes of the register that the tests of the repository have to find.

A mistake is a mutant if it has a title (what is wrong), where such a mistake was really seen, a
symptom (what its user sees), a line each, and a family. What kills it is the test that it names, or
else the certificate of one of its family's strategies.

The tests run in a process of their own, on a copy of the package with the mutant in it.
"""

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from minidist.comm.local.limits import cores
from minidist.errors import WrongInput, check_name
from minidist.verify.mistakes.overlay import PACKAGE, build
from minidist.verify.mistakes.register import Mistake, mistakes
from minidist.verify.strategies import STRATEGIES

ROOT = PACKAGE.parent  # of a checkout, where the tests are
CERTIFICATE = "tests/verify/test_equivalence.py::test_every_strategy_keeps_its_promise"
WORDS = ("title", "seen", "symptom", "family")
OPTIONS = """-x -q -vv --tb=short -p no:cacheprovider -p no:xdist --timeout=100
-o junit_family=xunit1""".split()
# {family: its strategies}
FAMILIES: dict[str, list[str]] = {}
for _name, _record in STRATEGIES.items():
    FAMILIES.setdefault(_record.family, []).append(_name)


def names() -> list[str]:
    """Return the names of all mutants, in their order."""
    return sorted(name for name, mistake in mistakes().items() if mistake.family)


def load(name: str) -> Mistake:
    """Return a mutant. ValueError: there is none of that name, or it is not complete."""
    check_name("mutant", name, names())
    mutant = mistakes()[name]
    for word in WORDS:
        if len(getattr(mutant, word).splitlines()) != 1:
            raise WrongInput(f"mutant {name} needs a line {word!r}")
    if not mutant.killed_by and mutant.family not in FAMILIES:
        raise WrongInput(f"mutant {name}: family is one of {', '.join(FAMILIES)}")
    return mutant


def tests_of(mutant: Mistake) -> list[str]:
    """Return the tests of which one must kill it, the likeliest first."""
    if mutant.killed_by:
        return [f"tests/{mutant.killed_by}"]
    files = [Path(edit.path).stem for edit in mutant.edits]
    own = FAMILIES[mutant.family]
    likely = sorted(own, key=lambda name: not any(name in file for file in files))
    return [f"{CERTIFICATE}[{name}]" for name in likely]


def judge(mutants: list[Mistake], tell: Callable[[dict], None]) -> None:
    """Call `tell` with a row for each mutant, as they end.

    A row has name, killed_by (a test, or None), diagnosis (what that test says), and the mutant's
    words.
    """
    if not (ROOT / "tests" / "conftest.py").is_file():
        raise WrongInput(f"mutants are judged by the tests of a checkout; {ROOT} has none")
    running: set[subprocess.Popen] = set()
    with tempfile.TemporaryDirectory(prefix="minidist-mutants-") as place:
        reference = build(Path(place, "reference"), {})
        compileall.compile_dir(reference, quiet=1)  # once for all
        with ThreadPoolExecutor(cores() + 1) as pool:  # one more: tests wait for ranks
            judged = partial(row_of, place=Path(place), reference=reference, running=running)
            rows = [pool.submit(judged, mutant) for mutant in mutants]
            try:
                for row in as_completed(rows):
                    tell(row.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in running.copy():
                    process.send_signal(signal.SIGINT)  # at which pytest tidies up
                raise


def row_of(mutant: Mistake, place: Path, reference: Path, running: set[subprocess.Popen]) -> dict:
    """Run a mutant's tests until one fails; `running` has their process meanwhile."""
    package = build(place / mutant.name, mutant.files(), linked=reference)
    report = package / "report.xml"
    command = [sys.executable, "-P", "-m", "pytest", *OPTIONS, f"--impl={package}"]
    process = subprocess.Popen(
        [*command, f"--junitxml={report}", *tests_of(mutant)],
        cwd=ROOT,
        env=os.environ | {"HYPOTHESIS_PROFILE": "first failure"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running.add(process)
    output, _ = process.communicate()
    running.remove(process)
    row = {"name": mutant.name, "killed_by": None, "diagnosis": None}
    row |= {word: getattr(mutant, word) for word in WORDS}
    if process.returncode:
        failed = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        case, failure = next(
            ((case, each) for case in failed for each in case if each.tag in ("failure", "error")),
            (None, None),
        )
        if case is None or failure is None:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-3000:]}")
        row["killed_by"] = f"{case.get('file')}::{case.get('name')}"
        row["diagnosis"] = message_of(failure)
    shutil.rmtree(package, ignore_errors=True)
    return row


def message_of(failure: ElementTree.Element) -> str:
    """Return the words of a failing test, without Python's repetition of the assertion."""
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
