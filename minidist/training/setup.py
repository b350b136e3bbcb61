"""What the training loop works on, made from the settings: trainer, optimizer, checkpoints."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.checkpoint import Keep, RunCheckpoints
from minidist.comm import Group, Mesh
from minidist.data_parallel.replicated import DataParallel
from minidist.errors import WrongInput
from minidist.hybrid import Hybrid
from minidist.mixed_precision import (
    LossScale,
    MixedPrecision,
    multiply_in_eight_bits,
    overflow_allowed,
)
from minidist.replicas import WholeMatrices
from minidist.trainer import Trainer
from minidist.training.kinds import Data, kind_of, model_of
from minidist.training.settings import DEFAULTS, OF_MESHES, Settings

AnyAdamW = optim.AdamW | MixedPrecision


def examples_of(data: Data, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return what to train on, if it makes a batch: inputs[n, ...] and targets[n, ...]."""
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
    muon = partial(optim.Muon, whole=WholeMatrices(group))
    rule = muon if settings.optimizer == "muon" else optim.AdamW
    adamw = rule(trainer.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    if settings.precision == "bfloat16-stochastic":
        if settings.optimizer == "muon":
            raise WrongInput("Muon's momentum is float32; use precision bfloat16, or adamw")
        adamw.rounding = optim.StochasticRounding(settings.seed)
    if not settings.half or adamw.rounding:
        return adamw
    # bfloat16 has float32's range: its gradients need no scale.
    scale = LossScale() if settings.precision == "float16" else LossScale(1.0, None)
    return MixedPrecision(adamw, group, scale)


def begin(
    keep: Keep | None,
    group: Group,
    trainer: Trainer,
    optimizer: AnyAdamW,
    data: Data,
    settings: Settings,
) -> RunCheckpoints:
    """Return the run and its checkpoints; load what it goes on from."""

    def fresh_weights() -> dict[str, np.ndarray]:
        return model_of(data, settings).state()

    about = description(data, settings)
    return RunCheckpoints(keep, group, trainer, optimizer, about, fresh_weights, DEFAULTS)


def description(data: Data, settings: Settings) -> dict:
    """Return what decides a run's numbers, except for its mesh: what a checkpoint says of it."""
    of_run = {name: value for name, value in asdict(settings).items() if name not in OF_MESHES}
    return {"settings": of_run, "data": kind_of(data).description(data)}


def warnings_for(settings: Settings) -> AbstractContextManager:
    """Return a context in which NumPy warns of an overflow, unless it only skips a step."""
    return overflow_allowed() if settings.half else nullcontext()
