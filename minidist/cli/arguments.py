"""What several commands share: words that are numbers, and options with the same name."""

import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction

from minidist.errors import WrongInput
from minidist.training import settings
from minidist.training.settings import Bound

DEFAULT = " (default: %(default)s)"  # at the end of an option's help
EXACT = re.compile(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", re.ASCII)


def option_of(name: str) -> str:
    """Return the option that sets a name: micro_batches -> --micro-batches."""
    return "--" + name.replace("_", "-")


def whole(most: int, why: str, least: int = 1) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`; why: the reason of the bound."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise argparse.ArgumentTypeError(f"{short(text)} is not a whole number from {least}")
        digits = text.lstrip("0") or "0"
        if len(digits) > len(str(most)) or int(digits) > most:  # int() reads 4300 digits at most
            raise argparse.ArgumentTypeError(f"{short(text)} is too large; {at_most(most, why)}")
        if int(digits) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(digits)

    return read


def at_most(most: float, why: str) -> str:
    """Return a bound and its reason: the end of an error."""
    return f"at most {f'{most:,}' if isinstance(most, int) else f'{most:g}'}: {why}"


def short(text: str) -> str:
    """Quote what was given; leave out the middle of a long text."""
    return repr(text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}")


ROUNDS = whole(1000, "each repeats all that is measured, and a median needs no more")


def number(what: str, most: float, why: str, above: bool = False) -> Callable[[str], float]:
    """Return a reader of finite numbers from 0 to `most`; why: the reason of the bound.

    what   the kind of number: "a learning rate"
    above  whether 0 itself is refused
    """

    def read(text: str) -> float:
        try:
            found = float(text) if text.isascii() else math.nan
        except ValueError:
            found = math.nan
        if not (found > 0 or (found == 0 and not above)):
            lowest = "above 0" if above else "from 0"
            raise argparse.ArgumentTypeError(f"{short(text)} is not {what} {lowest}")
        if found > most:
            raise argparse.ArgumentTypeError(f"{short(text)} is too large; {at_most(most, why)}")
        return found

    return read


def reader(bound: Bound) -> Callable[[str], float]:
    """Return a reader of the numbers within the bound of a setting."""
    most, why, kind, least = bound
    return number(kind, most, why) if kind else whole(int(most), why, least)


RANKS, SEED, STEPS = map(reader, (settings.RANKS, settings.SEED, settings.STEPS))
seconds = number("a number of seconds", 1e8, "that is three years", above=True)


def time(text: str) -> int | Fraction:
    """Read a whole number, a decimal fraction or a fraction, exactly."""
    if not EXACT.fullmatch(text):
        bound = at_most(10**9 - 1, "times are exact, and their sums are drawn")
        raise argparse.ArgumentTypeError(
            f"{short(text)} is not a time; write one as 2, 0.5 or 1/3, {bound}"
        )
    exact = Fraction(text)
    return exact.numerator if exact.denominator == 1 else exact


def times(text: str) -> int | Fraction | list[int | Fraction]:
    """Read one time, or several with commas between them."""
    found = [time(part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def add_flag(to: argparse._ActionsContainer, name: str, words: str) -> None:
    """Add an option without a value."""
    to.add_argument(name, action="store_true", help=words)


def add_option(
    to: argparse._ActionsContainer,
    name: str,
    words: str,
    read: Callable[[str], object] = str,
    metavar: str | None = None,
    **more,
) -> None:
    """Add an option with a value, a text unless it is read; its help ends with its default."""
    if "default" in more:
        words += DEFAULT
    to.add_argument(name, type=read, metavar=metavar, help=words, **more)


def add_json(parser: argparse._ActionsContainer) -> None:
    add_flag(parser, "--json", "print a list of rows as JSON")


def add_timeout(parser: argparse._ActionsContainer) -> None:
    add_option(parser, "--timeout", "end the run with an error after this", seconds, "SECONDS")


def add_transport(parser: argparse._ActionsContainer) -> None:
    words = "what a rank is; mpi: started by `mpiexec -n N minidist ...`; nccl: a process with a "
    words += "GPU of its own (default: process)"
    add_option(parser, "--transport", words, choices=["process", "thread", "mpi", "nccl"])


def add_device(parser: argparse._ActionsContainer) -> None:
    words = "where the arrays are: cpu, gpu (the ranks of a host take turns on its GPUs) or gpu:N"
    add_option(parser, "--device", words, default="cpu")


def check_several(processes: int) -> None:
    """Raise ValueError if MPI has started one process only, though `--transport mpi` was given."""
    if processes == 1:
        from minidist.comm.mpi.library import command  # needs NumPy, which not every command does

        raise WrongInput(f"MPI has started 1 process only; start this with: {command(4)}")
