"""The training loop of `minidist train`: a character Transformer on several ranks. Copy it.

Where the ranks split the batch alone, data_parallel_backward is all there is to it; where they
split the model, too, Hybrid takes its place in the same loop.
"""

import math
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from minidist import nn, optim
from minidist.comm import Group, Mesh
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Sampler, Text, example_indices, shard
from minidist.hybrid import Hybrid
from minidist.replicas import check_same_weights
from minidist.rng import Randomness


@dataclass(frozen=True)
class Settings:
    """What to train and how; `batch` counts windows of `context` characters, over all ranks.

    dp, pp, tp               the mesh; their product is the number of ranks
    schedule, micro_batches  of the pipeline, if pp > 1
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
    seed: int = 0
    dp: int = 1
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 4

    def __post_init__(self):
        share = -(-self.batch // self.dp)
        if self.pp * self.tp > 1 and self.micro_batches > share:
            raise ValueError(
                f"a batch of {self.batch} windows gives each of {self.dp} data-parallel ranks at "
                f"most {share}, too few for {self.micro_batches} micro-batches; use {share} or "
                f"fewer, or a batch of {(self.micro_batches - 1) * self.dp + 1} or more"
            )

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    def model(self, vocab: int) -> nn.Transformer:
        return nn.Transformer(
            vocab,
            self.width,
            self.heads,
            self.depth,
            self.context,
            self.seed,
            dropout=self.dropout,
            tied=self.tied,
        )


def windows(text: Text, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the text's inputs[n, T] and targets[n, T], if they make a batch."""
    inputs, targets = text.windows(settings.context)
    if settings.batch > len(inputs):
        raise ValueError(
            f"{text.source} has {len(inputs)} windows of {settings.context} characters, "
            f"fewer than a batch of {settings.batch}; use a smaller batch or a longer text"
        )
    return inputs, targets


def train(
    group: Group, text: Text, settings: Settings
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per character, and the weights."""
    model = settings.model(text.vocab).to(group.device)
    if settings.pp == settings.tp == 1:
        check_same_weights(model, group)
        mine, sum_squares = model, None  # the whole model, and its whole gradient
        backward = partial(data_parallel_backward, group, model)
    else:
        mesh = Mesh(group, dp=settings.dp, pp=settings.pp, tp=settings.tp)
        mine = Hybrid(model, mesh, settings.schedule, settings.micro_batches)
        backward, sum_squares = mine.backward, mine.sum_squares
    optimizer = optim.AdamW(mine.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    inputs, targets = windows(text, settings)
    batches = iter(Sampler(len(inputs), settings.batch, settings.seed))
    losses = []
    with progress_bar(settings.steps, group.rank) as bar:
        for step, batch in zip(range(settings.steps), batches, strict=False):
            x, y = inputs[batch.examples], targets[batch.examples]
            loss = backward(x, y, settings.seed, step, batch.examples)
            optimizer.clip_global_norm(1.0, sum_squares)
            optimizer.lr = settings.lr * warm_up_and_decay(step, settings.steps)
            optimizer.step()
            optimizer.zero_grad()
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}; use a lower lr")
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()
    return losses, mine.state()


def data_parallel_backward(
    group: Group,
    model: nn.Transformer,
    inputs: np.ndarray,
    targets: np.ndarray,
    seed: int,
    step: int,
    examples: np.ndarray,
) -> float:
    """Leave the whole batch's gradient in the model; return the batch's loss, in nats per target.

    inputs, targets  tokens [B, T] of the whole batch, on every rank
    examples         their global indices, [B], for dropout
    """
    examples = example_indices(inputs, targets, examples)
    mine = shard(np.arange(len(inputs)), group.rank, group.size)
    logits = model(inputs[mine], Randomness(seed, step, examples[mine]))
    loss = nn.cross_entropy(logits, targets[mine], targets.size)
    loss.backward()
    all_reduce_gradients(model, group)
    return float(group.all_reduce(loss.data))


def progress_bar(steps: int, rank: int) -> tqdm:
    """Return the bar that rank 0 shows in a terminal."""
    tqdm.set_lock(threading.RLock())  # tqdm's own would be a semaphore of the whole machine
    return tqdm(total=steps, unit="step", disable=None if rank == 0 else True)


def warm_up_and_decay(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a line up over 1/20 of the steps, a cosine to 0.1."""
    warm_up = max(1, steps // 20)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * progress)
