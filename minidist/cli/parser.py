"""The parser of each command: an error is two lines and has the nearest name; help has examples."""

import argparse
import shlex
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import NoReturn

from minidist.errors import nearest, unknown


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
        given, left = super().parse_known_args(args, namespace)
        if left:
            named = [a.option_strings for a in self._actions if a.choices and left[0] in a.choices]
            meant = next((f"; did you mean {names[0]} {left[0]}?" for names in named if names), "")
            self.error(f"unrecognized arguments: {shlex.join(left)}{meant}")
        return given, left

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse an unknown option before its value is taken for something else."""
        options = self._option_string_actions
        if any(x.nargs in (argparse.PARSER, argparse.REMAINDER) for x in self._actions):
            words = [*takewhile(lambda word: word.startswith("-"), words)]  # others: the command's
        for word in takewhile("--".__ne__, words):
            name = word.partition("=")[0]
            if word.startswith("--") and name not in options:
                near = nearest(name, options)
                self.error(f"unknown option {name}{f'; did you mean {near}?' if near else ''}")

    def _check_value(self, action: argparse.Action, value) -> None:
        """Replace argparse's list of choices by one that begins with the nearest."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown("name", value, list(action.choices)))
