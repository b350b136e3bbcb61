"""The training loop of `minidist train`: a data-parallel character Transformer. Copy it."""

import copy
import math
import threading
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from minidist import nn, optim
from minidist.autograd import no_grad
from minidist.backend import to_host
from minidist.comm import Group
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Sampler, Text
from minidist.rng import Randomness, generator
from minidist.tools import equivalence, strategies


@dataclass(frozen=True)
class Settings:
    """What to train and how; `batch` counts windows of `context` characters, over all ranks."""

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


def train(
    group: Group, text: Text, settings: Settings
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per character, and the weights."""
    model = settings.model(text.vocab).to(group.device)
    optimizer = optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    inputs, targets = text.windows(settings.context)
    shares = iter(Sampler(len(inputs), settings.batch, settings.seed, group.rank, group.size))
    losses = []
    # One process writes; tqdm's own lock would be a semaphore of the whole machine.
    tqdm.set_lock(threading.RLock())
    with tqdm(total=settings.steps, unit="step", disable=None if group.rank == 0 else True) as bar:
        for step, share in zip(range(settings.steps), shares, strict=False):
            examples = share.examples
            randomness = Randomness(settings.seed, step, examples)
            logits = model(inputs[examples], randomness)
            loss = nn.cross_entropy(logits, targets[examples], share.total * settings.context)
            loss.backward()
            all_reduce_gradients(model, group)
            optimizer.clip_global_norm(1.0)
            optimizer.lr = settings.lr * warm_up_and_decay(step, settings.steps)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(group.all_reduce(loss.data)))
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss is {losses[-1]} at step {step}; use a lower lr")
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            bar.update()
    return losses, model.state()


def warm_up_and_decay(step: int, steps: int) -> float:
    """Return the factor on the learning rate: a line up over 1/20 of the steps, a cosine to 0.1."""
    warm_up = max(1, steps // 20)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * progress)


def sample(
    model: nn.Transformer,
    text: Text,
    prompt: str,
    length: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """Return the prompt and `length` characters after it, drawn one by one from the model.

    The temperature divides the logits: 0.8 sharpens the distribution, 1 would leave it as it is.
    """
    random = generator(seed, "sample")
    tokens = text.encode(prompt).tolist()
    for _ in range(length):
        with no_grad():
            logits = model(np.array([tokens[-model.context :]])).data[0, -1]
        logits = to_host(logits).astype(np.float64) / temperature
        p = np.exp(logits - logits.max())
        tokens.append(int(random.choice(len(p), p=p / p.sum())))
    return text.decode(tokens)


def certify(model: nn.Transformer, text: Text, ranks: int, transport: str = "process") -> dict:
    """Compare the gradients of `ranks` ranks with one device's, in float64.

    The batch has 2 `ranks` + 1 windows, so the shards are uneven.
    """
    inputs, targets = text.windows(model.context)
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} windows"
    model = copy.deepcopy(model).astype("float64")
    case = strategies.Case(name, model, inputs[rows], targets[rows])
    return equivalence.check("naive", case, ranks, transport=transport)
