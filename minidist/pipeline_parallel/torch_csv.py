"""PyTorch's text of a pipeline's programs: the CSV that its schedules dump and load.

`_Action` and `_load_csv` in torch/distributed/pipelining/schedules.py (2.15), format
"compute_only". A row is a rank. A cell is stage, kind and micro-batch, or two of them in brackets,
or empty, while the rank is idle; we drop idle cells. The placement is read off the stages:

    0F0,3F0,,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1        rank 0 holds stages 0 and 3
    1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1                      rank 1 holds stages 1 and 2

F, B, I and W are ours: B is the whole backward, I and W are its halves. There are no chunks: a
rank's stages become its chunks in ascending order. There is no U, and a stage has no replicas. R is
REDUCE_GRAD, which PyTorch adds itself when it lowers a schedule, and so refuses in this format.
"""

import re

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import Action, Reduce, Update
from minidist.pipeline_parallel.placement import Programs
from minidist.pipeline_parallel.words import NUMBER, Word, action_of, from_cells, to_cells

ACTION = re.compile(rf"{NUMBER}(?:([FBIW]){NUMBER}|(REDUCE_GRAD))", re.ASCII)
LOWERED = re.compile(r"\d+(WAIT_|SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
CELL = r'"[^"]*"?|[^",]+'
PAIR = "({};{})OVERLAP_F_B"


def as_text(programs: list[list[Action]], placement: list[list[int]]) -> str:
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

    return "".join(",".join(row) + "\r\n" for row in to_cells(programs, word, PAIR))


def read(lines: list[Word]) -> Programs:
    """Return the programs of rows."""
    rows: list[list[list[Action]]] = []
    placement: list[list[int]] = []
    for line in lines:
        words = (w for cell in line.parts(CELL) for w in cell.parts(r'[^\s"](?:[^"]*[^\s"])?'))
        row = [_cell(word) for word in words]
        if not row:
            raise line.fault(f"rank {len(rows)} has no action, hence no stage; remove its line")
        own = sorted({k for cell in row for k, *_ in cell})
        rows.append([[action_of(sign, i, own.index(k)) for k, sign, i in cell] for cell in row])
        placement.append(own)
    return from_cells(rows, placement)


def _cell(word: Word) -> list[tuple[int, str, str | None]]:
    """Return (stage, sign, micro-batch) of one action, or of the two of a pair."""
    if word.text[0] != "(":
        return [_action(word)]
    if not re.fullmatch(r"\([^();]+;[^();]+\)\s*OVERLAP_F_B", word.text):
        raise word.fault(f"{word} is no pair; write one as (0F3;1B2)OVERLAP_F_B")
    return [_action(part) for part in word.parts(r"[^\s();]+(?=\s*[;)])")]


def _action(word: Word) -> tuple[int, str, str | None]:
    if (found := ACTION.fullmatch(word.text)) is not None:
        stage, sign, i, _ = found.groups()
        return int(stage), sign or Reduce.sign, i
    if LOWERED.match(word.text):
        raise word.fault(f"{word} is a lowered step; dump with format='compute_only'")
    raise word.fault(
        f"{word} is no action; write 2F0: stage, kind, micro-batch, and commas between "
        "cells; or, in a text of ours, 'rank 0' before F0"
    )
