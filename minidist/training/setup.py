"""The training loop's examples, trainer, optimizer and progress, made from the settings.

Progress is a bar in a terminal, else a line every tenth of the steps; and a log, if asked for. The
log is CSV. A row is written when its step is done, so an interrupted run has its rows.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minidist import nn, optim
from minidist.comm import Group, Mesh
from minidist.data_parallel.replicated import DataParallel
from minidist.errors import WrongInput, check_writable
from minidist.hybrid import Hybrid
from minidist.parallel import WholeMatrices
from minidist.parallel.mixed_precision import (
    LossScale,
    MixedPrecision,
    multiply_in_eight_bits,
)
from minidist.parallel.trainer import Trainer
from minidist.training.kinds import Data, kind_of
from minidist.training.settings import OF_MESHES, OF_SERVERS, Settings

AnyAdamW = optim.AdamW | MixedPrecision
HEAD = "step,loss,lr,seconds,bytes_sent,rank"


def examples_of(data: Data, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs[n, ...] and targets[n, ...] to train on; ValueError if n < batch."""
    kind = kind_of(data)
    inputs, targets = kind.examples(data, settings)
    if settings.batch > len(inputs):
        raise WrongInput(
            f"{kind.description(data)['source']}: {len(inputs)} {kind.unit} are fewer than a batch "
            f"of {settings.batch}; use a smaller batch, or more data"
        )
    return inputs, targets


def trainer_for(model: nn.Module, group: Group, settings: Settings) -> Trainer:
    """Return this rank's part of the model, on its device, in the precision of the settings."""
    model.to(group.device)
    if settings.dtype == "bfloat16" and group.device != "cpu":
        raise WrongInput("bfloat16 is NumPy's and ml_dtypes', not CuPy's; use --precision float16")
    if settings.half:
        model.astype(settings.dtype)
    if settings.precision == "float8":
        multiply_in_eight_bits(model)
    if not settings.on_mesh:
        return DataParallel(model, group)
    mesh = Mesh(group, dp=settings.dp, pp=settings.pp, cp=settings.cp, tp=settings.tp)
    if not isinstance(model, nn.Transformer | nn.Seq2Seq):
        raise WrongInput(f"a mesh trains nn.Transformer and nn.Seq2Seq, not {type(model).__name__}")
    zero, ep = settings.zero, settings.ep
    return Hybrid(model, mesh, settings.schedule, settings.micro_batches, ep=ep, zero=zero)


def optimizer_for(trainer: Trainer, group: Group, settings: Settings) -> AnyAdamW:
    """Return AdamW or Muon, of 16-bit weights with float32 copies or rounding at random.

    Of float16 with a loss scale, too.
    """
    adamw: optim.AdamW
    how: dict[str, Any] = {"lr": settings.lr, "betas": (0.9, 0.98)}
    if settings.optimizer == "muon":
        adamw = optim.Muon(trainer.parameters(), whole=WholeMatrices(group), **how)
    else:
        adamw = optim.AdamW(trainer.parameters(), **how)
    if settings.precision == "bfloat16-stochastic":
        if settings.optimizer == "muon":
            raise WrongInput("Muon's momentum is float32; use precision bfloat16, or adamw")
        adamw.rounding = optim.StochasticRounding(settings.seed)
    if not settings.half or adamw.rounding:
        return adamw
    # bfloat16 has float32's range: its gradients need no scale.
    scale = LossScale() if settings.precision == "float16" else LossScale(1.0, None)
    return MixedPrecision(adamw, group, scale)


def description(data: Data, settings: Settings) -> dict:
    """Return the record of a run in a checkpoint: its settings but for the ranks, and its data."""
    of_ranks = {*OF_MESHES, *OF_SERVERS}
    of_run = {name: value for name, value in asdict(settings).items() if name not in of_ranks}
    return {"settings": of_run, "data": kind_of(data).description(data)}


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
            line = f"step {step + 1} of {self.steps}: loss {loss:.3f}, {now - self.begin:.1f} s"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()
        if self.file is not None:
            self.file.close()
