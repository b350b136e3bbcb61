"""What several commands share: words that are numbers, and options with the same name."""

import argparse
import math
import re
from fractions import Fraction

DEFAULT = " (default: %(default)s)"  # at the end of an option's help
EXACT = re.compile(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", re.ASCII)


def option_of(name: str) -> str:
    """Return the option that sets a name: micro_batches -> --micro-batches."""
    return "--" + name.replace("_", "-")


def whole(text: str, least: int = 1) -> int:
    """Read a whole number from `least`."""
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def from_zero(text: str) -> int:
    """Read a whole number from 0."""
    return whole(text, 0)


def above_zero(text: str, what: str) -> float:
    """Read a finite number above 0; what: of these, in words."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what} above 0")
    return number


def seconds(text: str) -> float:
    return above_zero(text, "seconds")


def time(text: str) -> int | Fraction:
    """Read a whole number, a decimal fraction or a fraction, exactly."""
    if not EXACT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write one as 2, 0.5 or 1/3")
    exact = Fraction(text)
    return exact.numerator if exact.denominator == 1 else exact


def times(text: str) -> int | Fraction | list[int | Fraction]:
    """Read one time, or several with commas between them."""
    found = [time(part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="end the run with an error after this"
    )


def add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        choices=["process", "thread", "mpi", "nccl"],
        default="process",
        help="what a rank is; mpi: started by `mpiexec -n N minidist ...`; nccl: a process with a "
        "GPU of its own" + DEFAULT,
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the arrays are: cpu, gpu (the ranks of a host take turns on its GPUs) or gpu:N"
        + DEFAULT,
    )


def check_several(processes: int) -> None:
    """Raise ValueError if MPI has started one process only, though `--transport mpi` was given."""
    if processes == 1:
        from minidist.comm.mpi import command  # needs NumPy, which not every command does

        raise ValueError(f"MPI has started 1 process only; start this with: {command(4)}")
