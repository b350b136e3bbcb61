"""Options of commands: the fields of a dataclass, and their parser.

Each number has a bound, with its reason. An error of the parser is two lines and has the nearest
name; its help has examples.

class ExploreCommand(Command):
    '''Serve pages to a browser on this machine.'''              # the command's description
    port: int = option("0: any that is free", PORT, default=0)   # --port PORT
"""

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import takewhile
from typing import Any, ClassVar, NoReturn, Self

from minidist.errors import WrongInput, nearest, unknown
from minidist.training import settings
from minidist.training.settings import Bound

EXACT = re.compile(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", re.ASCII)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options: a new option changes the meaning of no script.

    examples  command lines, the end of the help
    """

    def __init__(self, examples: Collection[str] = (), **more):
        super().__init__(**{"allow_abbrev": False} | more)
        self.examples = examples

    def format_help(self) -> str:
        if not self.examples:
            return super().format_help()
        return "\n  ".join([f"{super().format_help()}\nexamples:", *self.examples]) + "\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` describes what it takes\n")

    def parse_known_args(self, args=None, namespace=None):
        """Parse; what is left is an error, here and in a command's actions."""
        self._refuse_unknown(args or ())
        options, left = super().parse_known_args(args, namespace)
        if left:
            named = [a.option_strings for a in self._actions if a.choices and left[0] in a.choices]
            meant = next((f"; did you mean {names[0]} {left[0]}?" for names in named if names), "")
            self.error(f"unrecognized arguments: {shlex.join(left)}{meant}")
        return options, left

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Refuse an unknown option before its value is taken for something else."""
        options = self._option_string_actions
        if any(x.nargs in (argparse.PARSER, argparse.REMAINDER) for x in self._actions):
            # What comes after them is the command's.
            arguments = [*takewhile(lambda argument: argument.startswith("-"), arguments)]
        for argument in takewhile("--".__ne__, arguments):
            name = argument.partition("=")[0]
            if argument.startswith("--") and name not in options:
                near = nearest(name, options)
                self.error(f"unknown option {name}{f'; did you mean {near}?' if near else ''}")

    def _check_value(self, action: argparse.Action, value) -> None:
        """Replace argparse's list of choices by one that begins with the nearest."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("name", value, list(action.choices)))


def option_of(name: str) -> str:
    """Return the option that sets a name: micro_batches -> --micro-batches."""
    return "--" + name.replace("_", "-")


def option(
    description: str,
    read: Callable[[str], object] = str,
    metavar: str | None = None,
    choices: Collection | None = None,
    default: object = None,
    **how,
) -> Any:
    """Return a field of a command: an option with a value.

    read     text -> value, also of a default that is a text
    default  shown at the end of the description, unless it is None or empty
    how      more keywords of argparse
    """
    how |= {"type": read, "metavar": metavar, "choices": choices, "default": default}
    description += "" if default in (None, "") else " (default: %(default)s)"
    return field(default=default, metadata={"help": description} | how)


def flag(description: str) -> Any:
    """Return a field of a command: an option without a value."""
    how = {"help": description, "action": "store_true", "default": False}
    return field(default=False, metadata=how)


def argument(
    description: str,
    metavar: str,
    read: Callable[[str], object] = str,
    **how,
) -> Any:
    """Return a field of a command: a word without an option before it."""
    return option(description, read, metavar, positional=True, **how)


@dataclass
class Command:
    """A command: a dataclass whose fields are its options, and whose docstring describes it.

    EXAMPLES  command lines, the end of the help
    GROUPS    {heading of the help: names of options}; "": no heading, "|": at most one of them
    asked     {name: value} of the options that differ from their default
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = ()
    GROUPS: ClassVar[dict[str, str]] = {}
    asked: dict[str, Any] = field(default_factory=dict, init=False)

    @classmethod
    def options(cls) -> dict[str, dict[str, Any]]:
        """Return {name: keywords of argparse} of each option."""
        return {each.name: dict(each.metadata) for each in fields(cls) if each.init}

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser; its arguments then make a command: command_type."""
        parser.description = " ".join((cls.__doc__ or "").split())
        parser.set_defaults(command_type=cls)
        options = cls.options()
        for heading, names in (cls.GROUPS or {"": " ".join(options)}).items():
            title, _, below = heading.partition(": ")
            group: argparse._ActionsContainer = parser
            if title == "|":
                group = parser.add_mutually_exclusive_group()
            elif title:
                group = parser.add_argument_group(title, below or None)
            for name in names.split():
                positional = options[name].pop("positional", False)
                group.add_argument(name if positional else option_of(name), **options[name])

    @classmethod
    def made_of(cls, parsed: argparse.Namespace) -> Self:
        """Return the command with the options that were parsed."""
        values = {each.name: getattr(parsed, each.name) for each in fields(cls) if each.init}
        command = cls(**values)
        command.asked = {
            name: value
            for name, how in cls.options().items()
            if (value := getattr(parsed, name)) != how.get("default")
        }
        return command

    def refuse(self, names: Iterable[str], message: str) -> None:
        """Raise ValueError for the first of these options that was given; {} is its name."""
        for name in names:
            if name in self.asked:
                raise WrongInput(message.format(option_of(name)))

    def run(self) -> int:
        """Do it; return the exit status."""
        raise NotImplementedError


def at_most(most: float, why: str) -> str:
    """Return a bound and its reason: the end of an error."""
    return f"at most {f'{most:,}' if isinstance(most, int) else f'{most:g}'}: {why}"


def short(text: str) -> str:
    """Quote an argument; leave out the middle of a long text."""
    return repr(text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}")


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


def number(kind: str, most: float, why: str, above: bool = False) -> Callable[[str], float]:
    """Return a reader of finite numbers from 0 to `most`; why: the reason of the bound.

    kind   of number: "a learning rate"
    above  whether 0 itself is refused
    """

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() else math.nan
        except ValueError:
            value = math.nan
        if not (value > 0 or (value == 0 and not above)):
            lowest = "above 0" if above else "from 0"
            raise argparse.ArgumentTypeError(f"{short(text)} is not {kind} {lowest}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{short(text)} is too large; {at_most(most, why)}")
        return value

    return read


def reader(bound: Bound) -> Callable[[str], float]:
    """Return a reader of the numbers within the bound of a setting."""
    most, why, kind, least = bound
    return number(kind, most, why) if kind else whole(int(most), why, least)


def exact_time(text: str) -> int | Fraction:
    """Read a whole number, a decimal fraction or a fraction, exactly."""
    if not EXACT.fullmatch(text):
        bound = at_most(10**9 - 1, "times are exact, and their sums are drawn")
        raise argparse.ArgumentTypeError(
            f"{short(text)} is not a time; write one as 2, 0.5 or 1/3, {bound}"
        )
    exact = Fraction(text)
    return exact.numerator if exact.denominator == 1 else exact


def exact_times(text: str) -> int | Fraction | list[int | Fraction]:
    """Read one time, or several with commas between them."""
    times = [exact_time(part) for part in text.split(",")]
    return times if len(times) > 1 else times[0]


RANKS, SEED, STEPS = map(reader, (settings.RANKS, settings.SEED, settings.STEPS))
SECONDS = number("a number of seconds", 1e8, "that is three years", above=True)


JSON = "print a list of rows as JSON"  # from here: options of several commands
TIMEOUT = "end the run with an error after this", SECONDS, "SECONDS"
TRANSPORT = (
    "what a rank is; mpi: started by `mpiexec -n N minidist ...`; nccl: a process with a GPU of "
    "its own (default: process)",
    str,
    None,
    ["process", "thread", "mpi", "nccl"],
)
DEVICE = "where the arrays are: cpu, gpu (the ranks of a host take turns on its GPUs) or gpu:N"


def check_several(processes: int) -> None:
    """Raise ValueError if MPI has started one process only, though `--transport mpi` was given."""
    if processes == 1:
        from minidist.comm.mpi.library import command  # needs NumPy, which not every command does

        raise WrongInput(f"MPI has started 1 process only; start this with: {command(4)}")
