"""Programs as text: read them and write them, in a format of our own or in PyTorch's.

Ours has the actions as the timeline prints them, a line per rank; "#" begins a comment:

    placement  0 3 | 1 2                             the stages of rank 0's chunks, of rank 1's
    rank 0     F0 F0.1 (F1 B0.1) F1.1 B1.1 B0 B1     brackets: a pair that may overlap
    rank 1     F0 F0.1 F1 F1.1 B0.1 B1.1 B0 B1

Without a placement, virtual stage k is on rank k mod p. What `grid` returns is such a text. For
PyTorch's see `torch_csv.py`.
"""

import os
import re
from pathlib import Path

from minidist.errors import WrongInput, check_name
from minidist.pipeline_parallel import torch_csv
from minidist.pipeline_parallel.actions import Action, Transfer
from minidist.pipeline_parallel.placement import Programs, placement_of
from minidist.pipeline_parallel.words import NUMBER, Word, from_cells, read_action, to_cells

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
    return _read(words) if any(HEAD.match(line) for line in lines) else torch_csv.read(words)


def write(programs: list[list[Action]], path: str | os.PathLike, format: str = "minidist") -> None:
    """Write programs without transfers to a file, from which `read` returns these programs.

    format  "minidist", or "torch" for PyTorch's CSV (what it leaves out: `torch_csv.py`)
    """
    Path(path).write_bytes(as_text(programs, format).encode())


def as_text(programs: list[list[Action]], format: str = "minidist") -> str:
    """Return what `write` writes."""
    check_name("format", format, FORMATS)
    if not programs:
        raise WrongInput("there is no program for any rank, so there is nothing to write")
    for program in programs:
        for action in program:
            _check(action)
    placement = placement_of(programs)
    if format == "torch":
        return torch_csv.as_text(programs, placement)
    lines = ["placement  " + " | ".join(" ".join(map(str, own)) for own in placement)]
    for r, row in enumerate(to_cells(programs, lambda r, a: str(a), "({} {})")):
        lines.append(f"rank {r}".ljust(10) + " " + " ".join(row))
    return "".join(line.rstrip() + "\n" for line in lines)


def _check(action: Action) -> None:
    if isinstance(action, Transfer):
        raise WrongInput(f"{action} is a transfer, which has no text; write the programs without")
    if not (isinstance(action, Action) and read_action(str(action))):
        raise WrongInput(f"{action!r} has no text; actions.py lists the actions that have")


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
    return from_cells([rows[r] for r in sorted(rows)], placements[0][1] if placements else None)


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
