"""The training loop of `minidist train`: a small model on several ranks. Copy it.

The model is a character Transformer for a text, a residual convolutional network for the digits,
an encoder-decoder for numbers in words (kinds.py).

Where the ranks split the batch alone, data_parallel_backward is all there is to it; where they
split the model, too, Hybrid takes its place in the same loop.
"""

import math
import threading
from contextlib import nullcontext
from dataclasses import asdict, dataclass
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
from minidist.kinds import Data, kind_of
from minidist.mixed_precision import LossScale, MixedPrecision, overflow_allowed
from minidist.replicas import check_same_weights
from minidist.rng import Randomness

OF_MESHES = "dp pp cp tp ep zero schedule micro_batches".split()


@dataclass(frozen=True)
class Settings:
    """What to train and how; `batch` counts windows of `context` characters, over all ranks.

    It counts images of digits, and pairs of numbers. Not every kind of data takes every setting,
    and some have defaults of their own (kinds.py).

    reconstruction           above 0: its weight, for two translators (nn.Dual)
    experts                  per block, each position takes two; 0: a dense feed-forward part
    shuffle                  False: every epoch has the order of the data
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
    reconstruction: float = 0.0
    experts: int = 0
    seed: int = 0
    shuffle: bool = True
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
        if self.reconstruction and (self.on_mesh or self.half):
            raise ValueError(
                "two translators with reconstruction are trained by ranks that split the batch "
                "alone, in float32; use no other axis than dp, no ZeRO, and precision float32, or "
                "reconstruction=0"
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

    def model(self, data: Data) -> nn.Sequential:
        """Return the untrained model for the data; ValueError if it has no use for a setting."""
        kind = kind_of(data)
        kind.check(self)
        return kind.model(data, self)


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
    model = settings.model(data).to(group.device)
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
    return settings.model(data).state()


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
