"""The training loop of `minidist train`, the same for every synchronous strategy.

    trainer.backward(batch)     the whole batch's gradient, in what this rank has   <- the strategy
    trainer.step(optimizer)     update what this rank updates; all ranks have the new weights

The trainer is this rank's part of the model: DataParallel where the ranks split the batch alone,
Hybrid on a mesh. Both are Trainers (trainer.py), so the loop is the same for both. What it needs is
made in setup.py, and RunCheckpoints loads what a run goes on from and saves between its steps.

Clipping: Pascanu et al. 2013, algorithm 1. Cosine: Loshchilov and Hutter 2017, equation 5.
"""

import math
from contextlib import nullcontext

import numpy as np

from minidist.checkpoint import Keep, RunCheckpoints
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch, Sampler
from minidist.parallel.mixed_precision import overflow_allowed
from minidist.training.kinds import Data, model_of
from minidist.training.settings import DEFAULTS, Settings
from minidist.training.setup import (
    Progress,
    description,
    examples_of,
    optimizer_for,
    trainer_for,
)


def train(
    group: Group,
    data: Data,
    settings: Settings,
    keep: Keep | None = None,
    log: str | None = None,
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per target, and the weights.

    keep  where to save, and whether to go on from what is saved there, on this mesh or another
    log   the file in which rank 0 writes a row per step, see setup.py
    """

    def untrained() -> dict[str, np.ndarray]:
        return model_of(data, settings).state()

    inputs, targets = examples_of(data, settings)
    trainer = trainer_for(model_of(data, settings), group, settings)
    optimizer = optimizer_for(trainer, group, settings)
    run = RunCheckpoints(
        keep, group, trainer, optimizer, description(data, settings), untrained, DEFAULTS
    )
    sampler = Sampler(len(inputs), settings.batch, settings.seed, shuffle=settings.shuffle)
    batches = sampler.after(len(run.losses))
    left = run.steps(settings.steps)  # saves checkpoints between the steps
    progress = Progress(group, trainer.groups, settings.steps, log, run.first, run.began)
    # An overflow only skips a step of 16-bit weights: no warning then.
    with progress, overflow_allowed() if settings.half else nullcontext():
        for step, drawn in zip(left, batches, strict=False):
            x, y, rows = inputs[drawn.examples], targets[drawn.examples], drawn.examples
            batch = Batch(x, y, settings.seed, step, rows, optimizer.loss_scale)
            loss = trainer.backward(batch)
            optimizer.clip_global_norm(1.0, trainer.sum_squares)
            optimizer.lr = settings.lr * warm_up_and_decay(step, settings.steps)
            run.before_update()  # a checkpoint may still be reading the weights
            trainer.step(optimizer)
            if not math.isfinite(loss):
                raise WrongInput(f"the loss is {loss} at step {step}; use a lower lr")
            run.losses.append(loss)
            progress.done(step, loss, optimizer.lr)
    return run.losses, trainer.state()


def warm_up_and_decay(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a line up over 1/20 of the steps, a cosine to 0.1."""
    warm_up = max(1, steps // 20)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * progress)
