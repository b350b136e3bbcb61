"""The mutants: mistakes of the register that the tests of the repository have to find.

A mistake is a mutant if it has a title (what is wrong), where such a mistake was really seen, a
symptom (what its user sees), a line each, and a family of strategies.

A mutant must pass the tests of a single device, and be killed by a property test of the repository
(mutant_tests.py, mutation_testing.py). Only where the model itself is wrong, and so every split of
it, the tests of a single device are those that kill it.
"""

from dataclasses import dataclass
from pathlib import Path

from minidist.course import lab
from minidist.course.mutant_tests import (
    CERTIFICATE,
    FAMILIES,
    OF_ONE_DEVICE,
    PROPERTIES,
    SINGLE_DEVICE,
)
from minidist.errors import WrongInput, check_name
from minidist.verify.mistakes import register

WORDS = ("title", "seen", "symptom", "family")


@dataclass(frozen=True)
class Mutant(register.Mistake):
    """A mistake with all of WORDS; family: a key of FAMILIES."""

    def batches(self, single: list[str]) -> list[list[str]]:
        """Return what it meets, one batch after the other; the first failure ends it.

        single  the tests of a single device that call what it changes
        """
        strategies, own = FAMILIES[self.family]
        files = [Path(edit.path).stem for edit in self.edits]
        likely = sorted(strategies, key=lambda name: not any(name in file for file in files))
        first = [f"{CERTIFICATE}[{name}]" for name in likely]
        mirrored = [test for test in own if Path(test).stem.removeprefix("test_") in files]
        rest = [test for test in own if test not in mirrored]
        others = [test for test in PROPERTIES if test not in own]
        known = [f"tests/{self.killed_by}"] if self.killed_by else []
        return [batch for batch in (single, known, first, mirrored, rest, others) if batch]

    @property
    def wrong_everywhere(self) -> bool:
        """Whether it is in what all splits are compared with: a test of a single device sees it."""
        return f"tests/{self.killed_by}".startswith(tuple(SINGLE_DEVICE))

    def why_single_device_tests_pass(self) -> str | None:
        """Return why they need not be run first; None if they must be."""
        if self.wrong_everywhere:
            return "they do not, for the model itself is wrong: they are what kills it"
        files = sorted({edit.path for edit in self.edits})
        if any(path.split("/")[0] in OF_ONE_DEVICE for path in files):
            return None
        return f"nothing that knows no ranks imports {', '.join(files)}"


def names() -> list[str]:
    return [mutant.name for mutant in lab.mutants()]


def load(name: str) -> Mutant:
    """Return a mutant. ValueError: there is none of that name, or it is not complete."""
    check_name("mutant", name, names())
    mutant = Mutant(**vars(register.mistakes()[name]))
    for word in WORDS:
        if len(getattr(mutant, word).splitlines()) != 1:
            raise WrongInput(f"mutant {name} needs a line {word!r}")
    if mutant.family not in FAMILIES:
        raise WrongInput(f"mutant {name}: family is one of {', '.join(FAMILIES)}")
    return mutant
