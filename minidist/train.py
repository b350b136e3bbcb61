"""The training loop of `minidist train`: a character Transformer on several ranks. Copy it.

`DataParallel` is the plain case, every line of it visible; `OnMesh` puts the same model on a mesh.
"""

import copy
import math
import threading
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from minidist import nn, optim
from minidist.autograd import no_grad
from minidist.backend import to_host
from minidist.comm import Group, Mesh
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Sampler, Text, example_indices, shard
from minidist.hybrid import Hybrid
from minidist.replicas import check_same_weights
from minidist.rng import Randomness, generator
from minidist.tools import equivalence, strategies


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
                f"most {share}, too few for {self.micro_batches} micro-batches; use micro_batches="
                f"{share} or less, or a batch of {(self.micro_batches - 1) * self.dp + 1} or more"
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


class DataParallel:
    """Every rank has the whole model, and its part of every batch."""

    def __init__(self, group: Group, model: nn.Transformer, settings: Settings):
        self.group, self.model, self.settings = group, model.to(group.device), settings
        check_same_weights(model, group)

    def parameters(self) -> list[nn.Parameter]:
        return self.model.parameters()

    def backward(self, inputs, targets, step: int, examples: np.ndarray) -> float:
        """Leave the whole batch's gradient; return its loss, in nats per target."""
        examples = example_indices(inputs, targets, examples)
        mine = shard(np.arange(len(inputs)), self.group.rank, self.group.size)
        logits = self.model(inputs[mine], Randomness(self.settings.seed, step, examples[mine]))
        loss = nn.cross_entropy(logits, targets[mine], targets.size)
        loss.backward()
        all_reduce_gradients(self.model, self.group)
        return float(self.group.all_reduce(loss.data))

    sum_squares = None  # every rank has the whole gradient

    def state(self) -> dict[str, np.ndarray]:
        return self.model.state()


class OnMesh:
    """The model and the batches are split over a mesh: data x pipeline x tensor."""

    def __init__(self, group: Group, model: nn.Transformer, settings: Settings):
        mesh = Mesh(group, dp=settings.dp, pp=settings.pp, tp=settings.tp)
        self.seed = settings.seed
        model = model.to(group.device)
        self.hybrid = Hybrid(model, mesh, settings.schedule, settings.micro_batches)
        self.parameters, self.state = self.hybrid.parameters, self.hybrid.state
        self.sum_squares = self.hybrid.sum_squares

    def backward(self, inputs, targets, step: int, examples: np.ndarray) -> float:
        return self.hybrid.backward(inputs, targets, self.seed, step, examples)


def train(
    group: Group, text: Text, settings: Settings
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on every rank; return the loss of each step, in nats per character, and the weights."""
    kind = DataParallel if settings.pp == settings.tp == 1 else OnMesh
    ranks = kind(group, settings.model(text.vocab), settings)
    optimizer = optim.AdamW(ranks.parameters(), lr=settings.lr, betas=(0.9, 0.98))
    inputs, targets = windows(text, settings)
    batches = iter(Sampler(len(inputs), settings.batch, settings.seed))
    losses = []
    # One process writes; tqdm's own lock would be a semaphore of the whole machine.
    tqdm.set_lock(threading.RLock())
    with tqdm(total=settings.steps, unit="step", disable=None if group.rank == 0 else True) as bar:
        for step, batch in zip(range(settings.steps), batches, strict=False):
            examples = batch.examples
            losses.append(ranks.backward(inputs[examples], targets[examples], step, examples))
            optimizer.clip_global_norm(1.0, ranks.sum_squares)
            optimizer.lr = settings.lr * warm_up_and_decay(step, settings.steps)
            optimizer.step()
            optimizer.zero_grad()
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss is {losses[-1]} at step {step}; use a lower lr")
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            bar.update()
    return losses, ranks.state()


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


def certify(
    model: nn.Transformer, text: Text, settings: Settings, transport: str = "process"
) -> dict:
    """Compare the gradients of the ranks with one device's, in float64.

    The batch has 2 windows per rank and one more, so the shards are uneven.
    """
    ranks = settings.ranks
    inputs, targets = text.windows(model.context)
    rows = generator(0, "certificate").permutation(len(inputs))[: 2 * ranks + 1]
    name = f"all {len(model.parameters())} parameters, {len(rows)} windows"
    model = copy.deepcopy(model).astype("float64")
    strategy, options = "naive", {}
    if settings.pp > 1 or settings.tp > 1:
        strategy, asked = "hybrid", ("dp", "pp", "tp", "schedule", "micro_batches")
        options = {key: getattr(settings, key) for key in asked}
    case = strategies.Case(name, model, inputs[rows], targets[rows], options=options)
    return equivalence.check(strategy, case, ranks, transport=transport)
