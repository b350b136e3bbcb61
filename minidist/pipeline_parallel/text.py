"""Programs as text: read them and write them, in a format of our own or in PyTorch's.

Ours has the actions as the timeline prints them, a line per rank; "#" begins a comment:

    placement  0 3 | 1 2                             the stages of rank 0's chunks, of rank 1's
    rank 0     F0 F0.1 (F1 B0.1) F1.1 B1.1 B0 B1     brackets: a pair that may overlap
    rank 1     F0 F0.1 F1 F1.1 B0.1 B1.1 B0 B1

Without a placement, virtual stage k is on rank k mod p. What `grid` returns is such a text. A
cell of a line is one action, or a pair of two.

PyTorch's is the CSV that its schedules dump and load (`_Action` and `_load_csv` in
torch/distributed/pipelining/schedules.py, 2.15), in the format "compute_only". A row is a rank. A
cell is stage, kind and micro-batch, or two of them in brackets, or empty, while the rank is idle;
we drop idle cells. The placement is read off the stages:

    0F0,3F0,,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1        rank 0 holds stages 0 and 3
    1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1                      rank 1 holds stages 1 and 2

F, B, I and W are ours: B is the whole backward, I and W are its halves. There are no chunks: a
rank's stages become its chunks in ascending order. There is no U, and a stage has no replicas. R is
REDUCE_GRAD, which PyTorch adds itself when it lowers a schedule, and so refuses in this format.
"""

import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from minidist.errors import WrongInput, check_name
from minidist.pipeline_parallel.actions import (
    KINDS,
    Action,
    Programs,
    Reduce,
    Transfer,
    Update,
    from_turns,
    pairs_of,
    placement_of,
)

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


def to_cells(
    programs: list[list[Action]], word: Callable[[int, Action], str], pair: str
) -> list[list[str]]:
    """Return the cells of every rank as text: word(rank, action), and two in a pair's brackets."""
    partner = {(r, f): b for r, f, b in pairs_of(programs)}
    rows = []
    for r, program in enumerate(programs):
        row: list[str] = []
        before = None  # the last action, unless it is in a pair
        for action in program:
            if before is not None and partner.get((r, before)) == action:
                del partner[r, before]
                row[-1], before = pair.format(row[-1], word(r, action)), None
            else:
                row.append(word(r, action))
                before = action
        rows.append(row)
    for (r, forward), backward in partner.items():
        raise WrongInput(
            f"rank {r}: {forward} and {backward} are a pair, and no neighbours; "
            "`validate` shows where they are"
        )
    return rows


FORMATS = "minidist", "torch"
HEAD = re.compile(rf"\s*(?:rank\s+{NUMBER}|placement)(?:\s*:|(?=[\s(])|$)", re.ASCII)
TORCH_LINE = re.compile(r'[\s",(]*\d+[A-Z]', re.ASCII)


def read(source: str | os.PathLike) -> Programs:
    """Return the programs of a file or a text, in either format. `validate` checks them.

    A string with a line break is a text. One without is the name of a file if there is one, else a
    text of one line. ValueError with the line, the column and the remedy.
    """
    name, text = _name_and_text(source)
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    words = [Word(line, name, number) for number, line in enumerate(lines, 1)]
    while words and not words[-1].text.strip(' \t,"'):  # a file's last line, or a sheet's
        words.pop()
    if not words:
        raise WrongInput(f"{name} is empty; write a line per rank, such as 'rank 0 F0 B0'")
    if any(line.startswith("def program(") for line in lines):
        page = "the schedules page of `minidist explore`"
        raise WrongInput(f"{name} is Python; paste it into {page}, and save it as text")
    return _read(words) if any(HEAD.match(line) for line in lines) else read_torch_csv(words)


def write(programs: list[list[Action]], path: str | os.PathLike, format: str = "minidist") -> None:
    """Write programs without transfers to a file, from which `read` returns these programs.

    format  "minidist", or "torch" for PyTorch's CSV (what it leaves out: above)
    """
    Path(path).write_bytes(as_text(programs, format).encode())


def as_text(programs: list[list[Action]], format: str = "minidist") -> str:
    """Return the text that `write` saves."""
    check_name("format", format, FORMATS)
    if not programs:
        raise WrongInput("there is no program for any rank, so there is nothing to write")
    for action in chain.from_iterable(programs):
        if isinstance(action, Transfer):
            raise WrongInput(
                f"{action} is a transfer, which has no text; write the programs without"
            )
        if not (isinstance(action, Action) and read_action(str(action))):
            raise WrongInput(f"{action!r} has no text; actions.py lists the actions that have")
    placement = placement_of(programs)
    if format == "torch":
        return as_torch_csv(programs, placement)
    lines = ["placement  " + " | ".join(" ".join(map(str, own)) for own in placement)]
    for r, row in enumerate(to_cells(programs, lambda r, a: str(a), "({} {})")):
        lines.append(f"rank {r}".ljust(10) + " " + " ".join(row))
    return "".join(line.rstrip() + "\n" for line in lines)


def _name_and_text(source: str | os.PathLike) -> tuple[str, str]:
    if isinstance(source, str) and (re.search(r"[\r\n]", source) or not os.path.exists(source)):
        if not (re.search(r"[\r\n]", source) or HEAD.match(source) or TORCH_LINE.match(source)):
            raise WrongInput(f"there is no file {source!r}; a text has lines such as 'rank 0 F0'")
        return "the text", source
    try:
        return str(source), Path(source).read_bytes().decode()
    except OSError as error:
        raise WrongInput(f"cannot read {str(source)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WrongInput(f"{source} is not UTF-8; save it as text, or as CSV, in UTF-8") from None


def _read(lines: list[Word]) -> Programs:
    rows, placements = {}, []
    for line in lines:
        line = line._replace(text=line.text.partition("#")[0])
        if not line.text.strip():
            continue
        if (head := HEAD.match(line.text)) is None:
            (word, *_) = line.parts(r"\S+")
            raise word.fault(f"{word} begins no line; begin one with 'rank 0', 'placement'")
        rest = line._replace(text=line.text[head.end() :], column=1 + head.end())
        if head[1] is None:
            of_ranks = rest.parts(r"(?<![^|])[^|]*")  # between bars, perhaps nothing
            placement = [[_stage(word) for word in own.parts(r"\S+")] for own in of_ranks]
            placements.append((line, placement))
        elif (rank := int(head[1])) in rows:
            raise line.fault(f"a second line of rank {rank}; make one of both")
        else:
            rows[rank] = [_cell(word) for word in rest.parts(r"\([^()]*\)|[()]|[^\s()]+")]
    first = next(r for r in range(len(rows) + 1) if r not in rows)
    if not rows or first < max(rows):
        raise lines[-1].fault(
            f"rank {first} has no line; write 'rank {first} F0 B0'; they count from 0"
        )
    for line, _ in placements[1:]:
        raise line.fault("a second placement; leave one of them out")
    for line, placement in placements:
        if len(placement) != len(rows):
            what = (
                f"{len(placement)} ranks have a placement, and {len(rows)} a line; write the same"
            )
            raise line.fault(f"{what} ranks, with '|' between them")
    return from_turns([rows[r] for r in sorted(rows)], placements[0][1] if placements else None)


def _stage(word: Word) -> int:
    if not re.fullmatch(NUMBER, word.text, re.ASCII):
        raise word.fault(f"{word} is no stage; write a placement as 0 3 | 1 2")
    return int(word.text)


def _cell(word: Word) -> list[Action]:
    """Return one action, or the two of a pair."""
    if word.text in ("(", ")"):
        raise word.fault(f"{word} has no other bracket; write a pair as (F3 B2)")
    actions = [_action(part) for part in word.parts(r"[^\s()]+")]
    if word.text[0] == "(" and len(actions) != 2:
        raise word.fault(f"{word} is no pair; write two actions, such as (F3 B2)")
    return actions


def _action(word: Word) -> Action:
    if (action := read_action(word.text)) is not None:
        return action
    if word.text[0] in "<>":
        raise word.fault(f"{word} is a transfer; leave it out, add_communication adds it")
    raise word.fault(f"{word} is no action; write them as F3 B3 I3 W3 U3 R F3.1, with spaces")


TORCH_ACTION = re.compile(rf"{NUMBER}(?:([FBIW]){NUMBER}|(REDUCE_GRAD))", re.ASCII)
TORCH_LOWERED = re.compile(r"\d+(WAIT_|SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
TORCH_CELL = r'"[^"]*"?|[^",]+'
TORCH_PAIR = "({};{})OVERLAP_F_B"


def as_torch_csv(programs: list[list[Action]], placement: list[list[int]]) -> str:
    """Return programs as PyTorch dumps them."""
    stages = [k for own in placement for k in own]
    if twice := [k for k in stages if stages.count(k) > 1]:
        raise WrongInput(
            f"stage {twice[0]} has replicas, for which PyTorch has no word; use format='minidist'"
        )

    def word(rank: int, action: Action) -> str:
        if isinstance(action, Update):
            raise WrongInput(f"PyTorch has no word for {action}; use format='minidist'")
        if action.chunk >= len(placement[rank]):
            raise WrongInput(f"rank {rank} has no chunk for {action}; `validate` shows where")
        k = placement[rank][action.chunk]
        reduces = isinstance(action, Reduce)
        return f"{k}REDUCE_GRAD" if reduces else f"{k}{action.sign}{action.micro_batch}"

    return "".join(",".join(row) + "\r\n" for row in to_cells(programs, word, TORCH_PAIR))


def read_torch_csv(lines: list[Word]) -> Programs:
    """Return the programs of rows."""
    rows: list[list[list[Action]]] = []
    placement: list[list[int]] = []
    for line in lines:
        words = (
            w for cell in line.parts(TORCH_CELL) for w in cell.parts(r'[^\s"](?:[^"]*[^\s"])?')
        )
        row = [_torch_cell(word) for word in words]
        if not row:
            raise line.fault(f"rank {len(rows)} has no action, hence no stage; remove its line")
        own = sorted({k for cell in row for k, *_ in cell})
        rows.append([[action_of(sign, i, own.index(k)) for k, sign, i in cell] for cell in row])
        placement.append(own)
    return from_turns(rows, placement)


def _torch_cell(word: Word) -> list[tuple[int, str, str | None]]:
    """Return (stage, sign, micro-batch) of one action, or of the two of a pair."""
    if word.text[0] != "(":
        return [_torch_action(word)]
    if not re.fullmatch(r"\([^();]+;[^();]+\)\s*OVERLAP_F_B", word.text):
        raise word.fault(f"{word} is no pair; write one as (0F3;1B2)OVERLAP_F_B")
    return [_torch_action(part) for part in word.parts(r"[^\s();]+(?=\s*[;)])")]


def _torch_action(word: Word) -> tuple[int, str, str | None]:
    if (found := TORCH_ACTION.fullmatch(word.text)) is not None:
        stage, sign, i, _ = found.groups()
        return int(stage), sign or Reduce.sign, i
    if TORCH_LOWERED.match(word.text):
        raise word.fault(f"{word} is a lowered step; dump with format='compute_only'")
    raise word.fault(
        f"{word} is no action; write 2F0: stage, kind, micro-batch, and commas between "
        "cells; or, in a text of ours, 'rank 0' before F0"
    )
