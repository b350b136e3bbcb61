"""The mutant zoo: wrong implementations, each a small change of the reference.

A mutant is a file mutants/NAME.toml: three lines in words (what is wrong, where such a mistake was
really seen, what its user sees) and one or more changes, each a text that stands exactly once in a
file of the package, and what stands there instead.

A mutant must pass the tests of a single device, and be killed by a property test of the repository
(test_batches.py, mutation_testing.py).
"""

import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from minidist.course.overlay import PACKAGE
from minidist.course.test_batches import (
    CERTIFICATE,
    FAMILIES,
    OF_ONE_DEVICE,
    PROPERTIES,
    SINGLE_DEVICE,
)

MUTANTS = Path(__file__).parent / "mutants"
WORDS = ("title", "seen", "symptom", "family")


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
