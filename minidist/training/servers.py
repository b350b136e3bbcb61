"""The training loop of `minidist train --servers N`: servers keep the weights, workers train.

Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1: Downpour SGD. Who
waits for whom, and what is pushed, is a `ServerPlan` (parameter_server.py). W: workers.

    batch          the batches of train.py; each is cut over the W workers. Worker w's part of batch
                   k is minibatch n = k W + w: every example of every batch is used once
    gradient       of a part, divided by the targets of the whole batch. So the gradients of a
                   batch's parts add up to the gradient of train(); with staleness=0 they are one
                   update
    update         otherwise one push: the gradient of a part, or the sum of several
    epoch          all workers take the batches in the same order, each at its own pace: a fast one
                   may begin the next epoch before a slow one has ended this one
    clipping       no rank has a batch's gradient. A worker clips the gradient of its part, to the
                   part's share of the batch's targets: the norms of the parts add up to 1 at most
    learning rate  a server counts its updates, and follows the schedule of train.py over the
                   number of updates that it will do; if there are more, they have the last rate
    rule           AdamW; with sparse pushes Adagrad, which does not change a row whose gradient is
                   zero

The order of the gradients is random, so no two runs are equal. But the servers' logs determine
their run: a replay gives its weights, bit for bit, if all that decides rounding is the same: the
machine, its libraries, the device, the dtype, and the number of ranks, which share the cores.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from minidist import checkpoint, nn, optim
from minidist.checkpoint import Keep
from minidist.checkpoint.parts import about
from minidist.checkpoint.run_checkpoints import LOSSES, about_run
from minidist.checkpoint.writing import whole_parts
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, Worker, join, train
from minidist.errors import WrongInput
from minidist.nn.datasets import Batch, Sampler
from minidist.parallel.trainer import loss_of
from minidist.training.kinds import Data, model_of
from minidist.training.loop import warm_up_and_decay
from minidist.training.settings import Settings
from minidist.training.setup import Progress, description, examples_of

TIMES_FOR_ADAGRAD = 10  # its first step is the learning rate, and later ones are smaller


class Served(NamedTuple):
    """What a rank has at the end of a training.

    losses     of each batch, in nats per target; each part's by the weights that its worker had
    state      the weights, the same on every rank
    log        a server's log, see `Server.log`; of a worker None
    staleness  of each gradient that a server got, in updates
    sent       bytes: weights that were pulled from a server, gradients that a worker pushed
    """

    losses: list[float]
    state: dict[str, np.ndarray]
    log: list[list[Push]] | None
    staleness: list[int]
    sent: int


def traffic_in_words(ranks: list[Served]) -> str:
    """Return how stale the gradients were, and how much was sent."""
    stale = [updates for rank in ranks for updates in rank.staleness]
    pulled = sum(rank.sent for rank in ranks if rank.log is not None) / 1e6
    pushed = sum(rank.sent for rank in ranks if rank.log is None) / 1e6
    return (
        f"pulled {pulled:.1f} MB, pushed {pushed:.1f} MB; "
        f"staleness {np.mean(stale):.2f} updates on average, {max(stale)} at most"
    )


def train_with_servers(
    group: Group,
    data: Data,
    settings: Settings,
    keep: Keep | None = None,
    log: str | None = None,
) -> Served:
    """Serve or work on this rank for `settings.steps` batches.

    The first `settings.servers` ranks serve.

    keep  where all ranks save a checkpoint at the end, which any mesh can read
    log   the file in which the first worker writes a row per minibatch, see setup.py
    """
    if keep is not None:
        keep.check()  # refused before the first step, not at the end
    model = model_of(data, settings).to(group.device)
    role, losses = serve_or_work(group, model, examples_of(data, settings), settings, log)
    if keep is not None:
        save(group, role, losses, keep, description(data, settings))
    pushes, staleness = (role.log, role.staleness()) if isinstance(role, Server) else (None, [])
    sent = role.group.ledger.bytes["send"]
    return Served(losses.tolist(), model.state(), pushes, staleness, sent)


def serve_or_work(
    group: Group,
    model: nn.Module,
    examples: tuple[np.ndarray, np.ndarray],
    settings: Settings,
    log: str | None = None,
) -> tuple[Server | Worker, np.ndarray]:
    """Train a model on examples (inputs[n, ...], targets[n, ...]); return the role, and losses."""
    plan, workers = plan_of(settings), workers_among(group.size, settings)
    minibatches = Minibatches(*examples, settings, workers)
    role = join(group, model, rule(settings, workers), plan)
    mine = minibatches.of(group.rank - plan.servers) if isinstance(role, Worker) else ()
    progress = Progress(group, [role.group], settings.steps, log, rank=plan.servers)
    train(role, minibatches.backward, minibatches.shown(mine, progress))
    return role, group.all_reduce(minibatches.losses)


def plan_of(settings: Settings) -> ServerPlan:
    """Return how servers and workers share the work; ValueError if they do not go together."""
    return ServerPlan(
        settings.servers or 1,
        settings.staleness,
        settings.quorum,
        n_fetch=settings.fetch_every or 1,
        n_push=settings.push_every or 1,
        sparse=settings.sparse,
    )


def plan_in_words(settings: Settings) -> str:
    """Return the words between `4 ranks, ` and the size of a batch."""
    servers = plan_of(settings).servers
    kind = "a server" if servers == 1 else "servers"
    return f"{servers} of them {kind}, the others each with a part of every batch of"


def workers_among(ranks: int, settings: Settings) -> int:
    """Return W; ValueError if servers cannot keep such weights, or have too few workers."""
    muon = settings.optimizer != "adamw"
    if settings.on_mesh or settings.half or settings.reconstruction or muon:
        raise WrongInput(
            "servers keep whole float32 weights for workers that split the batch alone; use no "
            "other axis than dp, no ZeRO, no reconstruction, precision float32, and AdamW"
        )
    return plan_of(settings).workers(ranks)


class Minibatches:
    """The workers' parts of the batches: number n is worker n mod W's part of batch n // W.

    losses  of each batch, the sum over the parts that `backward` was called for
    own     the loss of the last of these parts, nats per target
    """

    own = math.nan

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, settings: Settings, workers: int):
        self.inputs, self.targets = inputs, targets
        self.settings, self.workers = settings, workers
        self.losses = np.zeros(settings.steps)
        self.sampler = Sampler(len(inputs), settings.batch, settings.seed, shuffle=settings.shuffle)
        self.epoch = lru_cache(2)(self._epoch)  # it is drawn once for all its batches

    def _epoch(self, number: int) -> list[np.ndarray]:
        return [share.examples for share in self.sampler.epoch(number)]

    def of(self, worker: int) -> range:
        """Return the numbers of a worker's minibatches, in order; workers count from 0."""
        return range(worker, self.settings.steps * self.workers, self.workers)

    def part(self, n: int) -> Batch:
        """Return minibatch n, perhaps without examples."""
        step, worker = divmod(n, self.workers)
        number, batch = divmod(step, len(self.sampler))
        rows = self.epoch(number)[batch]
        whole = Batch(self.inputs[rows], self.targets[rows], self.settings.seed, step, rows)
        return whole.share(worker, self.workers)

    def backward(self, model: nn.Module, n: int) -> None:
        """Compute the gradient of minibatch n, in the model; clip it."""
        part = self.part(n)
        step, share = part.step, nn.counted(part.targets) / part.total
        loss = loss_of(model, part)
        loss.backward()
        optim.SGD(model.parameters(), lr=0.0).clip_global_norm(share)  # it only clips
        self.losses[step] += float(loss.data)
        self.own = float(loss.data) / share if share else math.nan
        if not math.isfinite(self.losses[step]):
            raise WrongInput(f"the loss is {self.losses[step]} at step {step}; use a lower lr")

    def shown(self, numbers: Iterable[int], progress: Progress) -> Iterator[int]:
        """Yield the numbers of minibatches, and show that each is done."""
        with progress:
            for n in numbers:
                yield n
                progress.done(n // self.workers, self.own, None)


class Scheduled:
    """A server's optimizer, whose learning rate follows the schedule over `updates` updates.

    Further updates have the last rate.
    """

    def __init__(self, optimizer: optim.Optimizer, updates: int):
        self.optimizer, self.highest, self.updates = optimizer, optimizer.lr, updates

    def step(self) -> None:
        self._set_rate()
        self.optimizer.step()

    def step_at(self, positions, gradient) -> None:
        self._set_rate()
        self.optimizer.step_at(positions, gradient)

    def _set_rate(self) -> None:
        factor = warm_up_and_decay(min(self.optimizer.steps, self.updates - 1), self.updates)
        self.optimizer.lr = self.highest * factor


def rule(settings: Settings, workers: int) -> Callable[[list], Scheduled]:
    """Return the function from a server's parameters to its optimizer."""

    def make(parameters: list[nn.Parameter]) -> Scheduled:
        optimizer: optim.Optimizer
        if settings.sparse:
            optimizer = optim.Adagrad(parameters, lr=TIMES_FOR_ADAGRAD * settings.lr)
        else:
            optimizer = optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.98))
        return Scheduled(optimizer, updates_of(settings.steps, workers, plan_of(settings)))

    return make


def updates_of(steps: int, workers: int, plan: ServerPlan) -> int:
    """Return how many updates a server does; with a quorum, if each had just enough workers.

    A slow worker does some more, with fewer than a quorum, when the others have finished.
    """
    if plan.quorum is not None:
        return -(-steps * workers // plan.quorum)
    if plan.staleness == 0:
        return steps
    pushes = -(-steps // plan.n_push)
    rest = 1 if (steps - 1) % plan.n_push else 0  # of the buffer, at the end
    return workers * (pushes + rest)


def save(
    group: Group, role: Server | Worker, losses: np.ndarray, keep: Keep, description: dict
) -> None:
    """Save weights and optimizer, each server its slice, under the names of the model's arrays."""
    parts, of = whole_parts({LOSSES: losses}), None
    if isinstance(role, Server):
        assert isinstance(role.optimizer, Scheduled)
        optimizer = role.optimizer.optimizer
        parts += checkpoint.parts_of(role.model, optimizer)
        of = about(optimizer)
    of_run = about_run(description, 0, of, keep.run(None))
    checkpoint.save(keep.folder, parts, len(losses), group, of_run)
