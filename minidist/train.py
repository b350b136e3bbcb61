"""The training loop of `minidist train`: a small model on several ranks. Copy it.

The model is a character Transformer for a text, a residual convolutional network for the digits.

Where the ranks split the batch alone, data_parallel_backward is all there is to it; where they
split the model, too, Hybrid takes its place in the same loop.
"""

import math
import threading
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
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
from minidist.datasets import Digits, Sampler, Text, example_indices, shard
from minidist.hybrid import Hybrid
from minidist.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.replicas import check_same_weights
from minidist.rng import Randomness

OF_MESHES = "dp pp cp tp ep zero schedule micro_batches".split()
OF_TEXTS = [*"context width heads depth dropout tied experts precision".split(), *OF_MESHES[1:]]


@dataclass(frozen=True)
class Settings:
    """What to train and how; `batch` counts windows of `context` characters, over all ranks.

    For the digits it counts images, and what OF_TEXTS lists must keep its default.

    experts                  per block, each position takes two; 0: a dense feed-forward part
    dp, pp, cp, tp           the mesh; their product is the number of ranks
    ep                       neighbours on dp that hold different experts
    zero                     1: ranks with the same parameters share the optimizer's state
    schedule, micro_batches  of the pipeline, on a mesh
    precision                dtype of weights, activations and gradients: float32, or float16 or
                             bfloat16 with a float32 copy of the weights
    """

    steps: int = 400
    batch: int = 32
    context: int = 64
    width: int = 64
    heads: int = 4
    depth: int = 2
    lr: float = 3e-3
    dropout: float = 0.0
    tied: bool = False
    experts: int = 0
    seed: int = 0
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    micro_batches: int = 4
    precision: str = "float32"

    def __post_init__(self):
        share = -(-self.batch // self.dp)
        if self.on_mesh and self.micro_batches > share:
            raise ValueError(
                f"a batch of {self.batch} windows gives each of {self.dp} data-parallel ranks at "
                f"most {share}, too few for {self.micro_batches} micro-batches; use {share} or "
                f"fewer, or a batch of {(self.micro_batches - 1) * self.dp + 1} or more"
            )
        if self.heads % self.tp:
            raise ValueError(
                f"cannot split {self.heads} heads over {self.tp} ranks; use a multiple of {self.tp}"
            )
        if self.context < self.cp:
            raise ValueError(
                f"cannot cut windows of {self.context} characters over cp={self.cp} ranks; use at "
                f"least {self.cp} characters, or {self.context} ranks at most"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp={self.dp}; use a dp that is a multiple of it"
            )
        if self.ep > 1 and self.experts < self.ep:
            raise ValueError(
                f"ep={self.ep} ranks cannot share {self.experts} experts; "
                f"use experts={self.ep} or more"
            )

    @property
    def on_mesh(self) -> bool:
        """Whether ranks split more than the batch, and Hybrid trains."""
        return self.pp * self.cp * self.tp * self.ep > 1 or self.zero > 0

    @property
    def half(self) -> bool:
        """Whether weights have 16 bits, and float32 copies."""
        return self.precision != "float32"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def model(self, data: Text | Digits) -> nn.Sequential:
        """Return the untrained model for a text or for the digits."""
        if isinstance(data, Digits):
            self.check_images()
            return nn.CNN(1, 10, seed=self.seed)
        return nn.Transformer(
            data.vocab,
            self.width,
            self.heads,
            self.depth,
            self.context,
            self.seed,
            dropout=self.dropout,
            tied=self.tied,
            experts=self.experts,
            top_k=max(1, min(2, self.experts)),
        )

    def check_images(self) -> None:
        """Raise ValueError if a setting was changed that a convolutional network does not have."""
        for field in fields(self):
            if field.name in OF_TEXTS and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is a setting of texts, not of digits; leave it out")


def examples(data: Text | Digits, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return what to train on: inputs[n, T] and targets[n, T], or images and labels[n]."""
    return data.train if isinstance(data, Digits) else data.windows(settings.context)


def windows(text: Text | Digits, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples, if they make a batch."""
    inputs, targets = examples(text, settings)
    if settings.batch > len(inputs) and isinstance(text, Digits):
        raise ValueError(f"{len(inputs)} images are fewer than a batch of {settings.batch}")
    if settings.batch > len(inputs):
        raise ValueError(
            f"{text.source} has {len(inputs)} windows of {settings.context} characters, "
            f"fewer than a batch of {settings.batch}; use a smaller batch or a longer text"
        )
    return inputs, targets


def train(
    group: Group, text: Text | Digits, settings: Settings, keep: Keep | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per target, and the weights.

    keep  where to save, and whether to go on from what is saved there, on this mesh or another
    """
    model = settings.model(text).to(group.device)
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
    inputs, targets = windows(text, settings)
    fresh = partial(fresh_weights, text, settings)
    run = Training(keep, group, mine, optimizer, told(text, settings), fresh)
    steps = range(run.first, settings.steps)
    batches = Sampler(len(inputs), settings.batch, settings.seed).after(run.first)
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


def fresh_weights(data: Text | Digits, settings: Settings) -> dict[str, np.ndarray]:
    return settings.model(data).state()


def told(data: Text | Digits, settings: Settings) -> dict:
    """Return what decides a run's numbers, except for its mesh: what a checkpoint says of it."""
    of_run = {name: value for name, value in asdict(settings).items() if name not in OF_MESHES}
    of_data = {"source": data.source}
    if isinstance(data, Text):
        digest = zlib.crc32(data.tokens.astype("<i8"))
        of_data |= {"characters": data.characters, "digest": digest}
    return {"settings": of_run, "data": of_data}


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
    loss = nn.cross_entropy(model(inputs[mine], randomness), targets[mine], nn.counted(targets))
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
