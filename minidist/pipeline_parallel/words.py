"""Words of a text with their places, actions as words, and the cells of a program.

A cell is one action, or a pair of two.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import KINDS, Action, Reduce
from minidist.pipeline_parallel.placement import Programs, pairs_of

NUMBER = r"(\d{1,9})"
ACTION = re.compile(rf"(?:([FBIWU]){NUMBER}|R)(?:\.{NUMBER})?", re.ASCII)
LONGEST = 40  # characters of a word that an error shows


class Word(NamedTuple):
    """A piece of a text, and where it is: lines and columns count from 1."""

    text: str
    source: str
    line: int
    column: int = 1

    def __str__(self):
        return repr(self.text if len(self.text) <= LONGEST else self.text[:LONGEST] + "...")

    def parts(self, pattern: str) -> Iterator["Word"]:
        """Yield the pieces that match a pattern."""
        for found in re.finditer(pattern, self.text):
            yield self._replace(text=found[0], column=self.column + found.start())

    def fault(self, what: str) -> "Unreadable":
        message = f"{self.source}, line {self.line}, column {self.column}: {what}"
        return Unreadable(message, self.line, self.column)


class Unreadable(WrongInput):
    """A text that cannot be read: at this line and this column, which count from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None):
        super().__init__(message)
        self.line, self.column = line, column


def read_action(text: str) -> Action | None:
    """Return the action of which this is the text, such as F3.1 or R; None if it is of none."""
    if (found := ACTION.fullmatch(text)) is None:
        return None
    sign, micro_batch, chunk = found.groups()
    return action_of(sign, micro_batch, int(chunk or 0))


def action_of(sign: str, micro_batch: str | None, chunk: int) -> Action:
    """Return the action of a sign; without a micro-batch it is R."""
    return Reduce(chunk) if micro_batch is None else KINDS[sign](int(micro_batch), chunk)


def from_cells(rows: list[list[list[Action]]], placement: list[list[int]] | None) -> Programs:
    """Return programs, given the cells of every rank."""
    pairs = [(r, cell[0], cell[1]) for r, row in enumerate(rows) for cell in row if len(cell) == 2]
    return Programs([[a for cell in row for a in cell] for row in rows], placement, pairs)


def to_cells(
    programs: list[list[Action]], word: Callable[[int, Action], str], pair: str
) -> list[list[str]]:
    """Return the cells of every rank as text: word(rank, action), and two in a pair's brackets."""
    partner = {(r, f): b for r, f, b in pairs_of(programs)}
    rows, unwritten = [], set(partner)
    for r, program in enumerate(programs):
        row, rest = [], list(reversed(program))
        while rest:
            action = rest.pop()
            cell = word(r, action)
            if rest and (r, action) in unwritten and partner[r, action] == rest[-1]:
                unwritten.remove((r, action))
                cell = pair.format(cell, word(r, rest.pop()))
            row.append(cell)
        rows.append(row)
    for r, forward in unwritten:
        raise WrongInput(
            f"rank {r}: {forward} and {partner[r, forward]} are a pair, and no neighbours; "
            "`validate` shows where they are"
        )
    return rows
