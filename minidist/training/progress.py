"""What a run shows of its steps: a bar in a terminal, else a line every tenth; a log, if asked for.

The log is CSV. A row is written when its step is done, so an interrupted run has its rows.

    step        updates so far, as the checkpoints count them
    loss        of the batch, nats per target; with servers, of this rank's part of the batch
    lr          learning rate of the update; with servers none: only a server knows it
    seconds     since the step before was done
    bytes_sent  in this step by this rank alone, and not for checkpoints
    rank        this rank: 0, or with servers the first worker
"""

import re
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from minidist.comm import Group
from minidist.errors import WrongInput, check_writable

HEAD = "step,loss,lr,seconds,bytes_sent,rank"


def rows_of(log: str | Path) -> list[str]:
    """Return the rows of a log, none if there is no file; ValueError if it cannot be written."""
    path = Path(log)
    check_writable(path, f"the log {str(path)!r}")
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    if lines and lines[0] != HEAD:
        raise WrongInput(f"{str(path)!r} is not a log of `minidist train`; use another file")
    return [row for row in lines if re.fullmatch(r"\d+(,[^,]*){5}", row)]


class Progress:
    """The steps of a run as one rank shows them; the other ranks show nothing.

    groups  that the rank sends through in a step
    log     None: no log. Of an older log the rows up to step `began + first` are kept
    first   steps of this run that were done before; `began`: steps before the model grew
    """

    def __init__(
        self,
        group: Group,
        groups: Iterable[Group],
        steps: int,
        log: str | Path | None = None,
        first: int = 0,
        began: int = 0,
        rank: int = 0,
    ):
        self.shows, self.steps, self.began, self.rank = group.rank == rank, steps, began, rank
        self.ledgers = [each.ledger for each in dict.fromkeys([group, *groups])]
        tqdm.set_lock(threading.RLock())  # tqdm's own would be a semaphore of the whole machine
        hidden = None if self.shows else True  # None: where stderr is no terminal
        self.bar = tqdm(total=steps, initial=first, unit="step", disable=hidden)
        self.file = None
        if self.shows and log is not None:
            kept = [row for row in rows_of(log) if int(row.split(",")[0]) <= began + first]
            new = Path(f"{log}.new")
            new.write_text("\n".join([HEAD, *kept, ""]), encoding="utf-8")
            self.file = open(new.replace(log), "a", buffering=1)  # each row is written at once
        self.begin = self.last = time.perf_counter()
        self.sent = sum(ledger.total for ledger in self.ledgers)

    def done(self, step: int, loss: float, lr: float | None) -> None:
        """Show that a step, counted from zero, is done; lr: None if this rank does not know it."""
        if not self.shows:
            return
        now, sent = time.perf_counter(), sum(ledger.total for ledger in self.ledgers)
        if self.file is not None:
            rate = "" if lr is None else f"{lr:.9g}"
            row = f"{self.began + step + 1},{loss:.9g},{rate},{now - self.last:.6f}"
            print(row, sent - self.sent, self.rank, sep=",", file=self.file)
        self.last, self.sent = now, sent
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update()
        if self.bar.disable and (step + 1) * 10 // self.steps > step * 10 // self.steps:
            words = f"step {step + 1} of {self.steps}: loss {loss:.3f}, {now - self.begin:.1f} s"
            print(words, file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()
        if self.file is not None:
            self.file.close()
