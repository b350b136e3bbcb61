"""The training loop of `minidist train`: a small model on several ranks. Copy it.

The model is a character Transformer for a text, a residual convolutional network for the digits,
an encoder-decoder for numbers in words (kinds.py).

Where the ranks split the batch alone, data_parallel_backward is all there is to it; where they
split the model, too, Hybrid takes its place in the same loop.
"""

import math
import threading
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import numpy as np
from tqdm import tqdm

from minidist import nn, optim
from minidist.autograd import no_grad
from minidist.autograd.losses import scaled
from minidist.checkpoint import Keep, Training
from minidist.comm import Group, Mesh
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.datasets import Sampler, example_indices, shard
from minidist.hybrid import Hybrid
from minidist.kinds import Data, kind_of, model_of
from minidist.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.replicas import check_same_weights
from minidist.rng import Randomness
from minidist.settings import OF_MESHES, Settings


def windows(data: Data, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return what to train on, if it makes a batch: inputs[n, ...] and targets[n, ...]."""
    kind = kind_of(data)
    inputs, targets = kind.examples(data, settings)
    if settings.batch > len(inputs):
        raise ValueError(
            f"{kind.told(data)['source']}: {len(inputs)} {kind.unit} are fewer than a batch of "
            f"{settings.batch}; use a smaller batch, or more data"
        )
    return inputs, targets


def train(
    group: Group, data: Data, settings: Settings, keep: Keep | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per target, and the weights.

    keep  where to save, and whether to go on from what is saved there, on this mesh or another
    """
    model = model_of(data, settings).to(group.device)
    if settings.half:
        model.astype(settings.precision)
    if not settings.on_mesh:
        check_same_weights(model, group)
        sync_batch_norm(model, group)
        mine, sum_squares = model, None  # the whole model, and its whole gradient
        backward, step_with = partial(data_parallel_backward, group, model), step_and_forget
    else:
        axes = {name: getattr(settings, name) for name in ("dp", "pp", "cp", "tp")}
        more = {name: getattr(settings, name) for name in ("schedule", "micro_batches")}
        mine = Hybrid(model, Mesh(group, **axes), ep=settings.ep, zero=settings.zero, **more)
        backward, sum_squares, step_with = mine.backward, mine.sum_squares, mine.step
    optimizer = optim.AdamW(mine.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    if settings.half:  # bfloat16 has float32's range: its gradients need no scale
        scale = LossScale() if settings.precision == "float16" else LossScale(1.0, None)
        optimizer = MixedPrecision(optimizer, group, scale)
    inputs, targets = windows(data, settings)
    fresh = partial(fresh_weights, data, settings)
    run = Training(keep, group, mine, optimizer, told(data, settings), fresh)
    steps = range(run.first, settings.steps)
    sampler = Sampler(len(inputs), settings.batch, settings.seed, shuffle=settings.shuffle)
    batches = sampler.after(run.first)
    quiet = overflow_allowed() if settings.half else nullcontext()
    with progress_bar(len(steps), group.rank) as bar, quiet:
        for step, batch in zip(steps, batches, strict=False):
            x, y = inputs[batch.examples], targets[batch.examples]
            loss = backward(x, y, settings.seed, step, batch.examples, optimizer.loss_scale)
            optimizer.clip_global_norm(1.0, sum_squares)
            optimizer.lr = settings.lr * warm_up_and_decay(step, settings.steps)
            run.before_update()
            step_with(optimizer)
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}; use a lower lr")
            run.losses.append(loss)
            run.after(step + 1, settings.steps)
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()
    run.end()
    return run.losses, mine.state()


def fresh_weights(data: Data, settings: Settings) -> dict[str, np.ndarray]:
    return model_of(data, settings).state()


def told(data: Data, settings: Settings) -> dict:
    """Return what decides a run's numbers, except for its mesh: what a checkpoint says of it."""
    of_run = {name: value for name, value in asdict(settings).items() if name not in OF_MESHES}
    return {"settings": of_run, "data": kind_of(data).told(data)}


def data_parallel_backward(
    group: Group,
    model: nn.Module,
    inputs: np.ndarray,
    targets: np.ndarray,
    seed: int,
    step: int,
    examples: np.ndarray,
    loss_scale: float = 1.0,
) -> float:
    """Leave the whole batch's gradient in the model; return the batch's loss, in nats per target.

    inputs, targets  of the whole batch, on every rank: tokens [B, T], or images and labels
    examples         their global indices, [B], for dropout
    loss_scale       what multiplies the gradient, not the loss
    """
    examples = example_indices(inputs, targets, examples)
    mine = shard(np.arange(len(inputs)), group.rank, group.size)
    randomness = Randomness(seed, step, examples[mine], len(inputs), loss_scale=loss_scale)
    loss = model.loss(model(inputs[mine], randomness), targets[mine], nn.counted(targets))
    scaled(loss, loss_scale).backward()
    all_reduce_gradients(model, group)
    return float(group.all_reduce(loss.data))


def step_and_forget(optimizer: optim.Optimizer) -> None:
    """Update the weights; drop the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def accuracy(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of images[n, ...] whose largest logit is at their label."""
    model.eval()
    with no_grad():
        right = (model(images).data.argmax(axis=-1) == labels).mean()
    model.train()
    return float(right)


def progress_bar(steps: int, rank: int) -> tqdm:
    """Return the bar that rank 0 shows in a terminal."""
    tqdm.set_lock(threading.RLock())  # tqdm's own would be a semaphore of the whole machine
    return tqdm(total=steps, unit="step", disable=None if rank == 0 else True)


def warm_up_and_decay(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a line up over 1/20 of the steps, a cosine to 0.1."""
    warm_up = max(1, steps // 20)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * progress)
