"""Which mistakes of the register give exactly these gradients?  The case runs again with each one.

A new process imports the package as it should be, plants one mistake after another in its own
functions, and runs the case on threads. So this process does not change, and a mistake that hangs
is ended. Only mistakes in functions that the case calls are tried. It takes some seconds, at most
LIMIT, and only where the arithmetic of the other files has found no cause.

The right package is the one that `overlay.build` has put files into, or else this one. If this one
has been edited in place, nothing can be compared: then the edited places are named.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import cloudpickle

from minidist.comm import Cluster
from minidist.comm.local import worker as by_value
from minidist.errors import CommError
from minidist.verify.causes.finding import Gradients
from minidist.verify.compare import compare
from minidist.verify.mistakes.overlay import PACKAGE, reference
from minidist.verify.mistakes.register import NUMBERS, Mistake, mistakes, planted
from minidist.verify.outcomes import Outcome, of_job
from minidist.verify.strategies import STRATEGIES
from minidist.verify.strategies.cases import Case

LIMIT = 60.0  # seconds for all mistakes
PATIENCE = 20.0  # seconds for one; ranks that wait for each other are found in one
IN_PLACE = "in-place"  # no name of a mistake
Worker = Callable[..., Outcome]
Place = tuple[str, str]  # a file and the qualified name of a function


def known(strategy: str, case: Case, got: list[Gradients]) -> str | None:
    """Return in words which mistakes give the ranks these gradients; None if none does."""
    packed = by_value.dumps((strategy, case.to("cpu"), got))
    return in_words(_in_a_new_process(packed).split())


def in_words(names: list[str]) -> str | None:
    """Return in words the names of `matches`: what is wrong in at most three mistakes."""
    three = [mistakes()[name] for name in names if name != IN_PLACE][:3]
    titles = ", or of ".join(f"{m.name}: {m.title or m.edits[0].function}" for m in three)
    if IN_PLACE in names:
        return f"this package was edited where the register has the mistake {titles}"
    return f"{NUMBERS} {titles}" if three else None


def _in_a_new_process(packed: bytes) -> str:
    """Return the text that `main` prints there within LIMIT."""
    home = str(reference())
    try:
        printed = subprocess.run(
            [sys.executable, "-m", __name__],
            input=packed,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([home, *filter(None, sys.path)])},
            timeout=LIMIT,
        ).stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    return printed.decode()


def main() -> None:
    """Print the names of the mistakes, one a line."""
    strategy, case, got = cloudpickle.load(sys.stdin.buffer)
    for name in matches(strategy, case, got):
        print(name, flush=True)


def matches(strategy: str, case: Case, got: list[Gradients]) -> Iterator[str]:
    """Yield the mistakes that give these gradients: those of the strategy's family, or others.

    If the package gives them without any, it has been edited: then yield IN_PLACE, and the mistakes
    that no longer apply to the functions that the case calls.
    """
    record, of_family = STRATEGIES[strategy], False
    worker = partial(record.worker or partial(of_job, record.start), **case.options)
    sound, called = _watched(worker, case, len(got))
    candidates = [m for m in mistakes().values() if not called.isdisjoint(_places(m))]
    if sound is None or _equal(sound, got):
        if edited := [m.name for m in candidates if not _applies(m)]:
            yield from (IN_PLACE, *edited)
        return
    for mistake in sorted(candidates, key=lambda m: m.family != record.family):
        if of_family and mistake.family != record.family:
            return
        try:
            with planted(mistake.name):
                again = _gradients(worker, case, len(got))
        except ValueError:  # it changes more than bodies of functions, or does not apply
            continue
        if again is not None and _equal(again, got):
            of_family = True
            yield mistake.name


def _applies(mistake: Mistake) -> bool:
    try:
        return bool(mistake.files())
    except ValueError:
        return False


def _watched(worker: Worker, case: Case, size: int) -> tuple[list[Gradients] | None, set[Place]]:
    """Return the ranks' gradients, and the functions that they call."""
    called: set[Place] = set()

    def trace(frame: FrameType, *_) -> None:
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.settrace(trace)
    try:
        return _gradients(worker, case, size), called
    finally:
        threading.settrace(None)


def _gradients(worker: Worker, case: Case, size: int) -> list[Gradients] | None:
    """Return every rank's gradients; None if the ranks fail, or wait for each other."""
    try:
        with Cluster(size, "thread") as ranks:
            return [outcome.gradients for outcome in ranks.run(worker, case, timeout=PATIENCE)]
    except CommError:
        return None


def _equal(again: list[Gradients], got: list[Gradients]) -> bool:
    return all(compare([a], b).ok for a, b in zip(again, got, strict=True))


def _places(mistake: Mistake) -> list[Place]:
    """Return the functions that a mistake changes."""
    return [(str(PACKAGE / edit.path), edit.name) for edit in mistake.edits]


if __name__ == "__main__":
    main()
