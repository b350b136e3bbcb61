"""The training loop of `minidist train --servers N`: servers keep the weights, workers train.

Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1: Downpour SGD. Who
waits for whom, and what is pushed, is a `Plan` (data_parallel/server_plan.py). W: workers.

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
their run: `replay` gives its weights, bit for bit, if all that decides rounding is the same: the
machine, its libraries, the device, the dtype, and the number of ranks, which share the cores.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from minidist import checkpoint, nn, optim
from minidist.checkpoint.parts import about
from minidist.checkpoint.training import LOSSES
from minidist.checkpoint.writing import whole_parts
from minidist.comm import Group
from minidist.data_parallel.parameter_server import Plan, Push, Server, Worker, join, train
from minidist.datasets import Sampler, shard
from minidist.kinds import model_of
from minidist.rng import Randomness
from minidist.settings import Settings
from minidist.tools.replay_server import replay_server
from minidist.train import progress_bar, told, warm_up_and_decay, windows

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


def train_with_servers(
    group: Group, data, settings: Settings, plan: Plan, folder: str | None = None
) -> Served:
    """Serve or work on this rank, `settings.steps` batches; the first `plan.servers` ranks serve.

    folder  where all ranks save a checkpoint at the end, which any mesh can read
    """
    model = model_of(data, settings).to(group.device)
    role, losses = serve_or_work(group, model, windows(data, settings), settings, plan)
    if folder is not None:
        save(group, role, losses, folder, told(data, settings))
    served, sent = isinstance(role, Server), role.group.ledger.bytes["send"]
    log, staleness = (role.log, role.staleness()) if served else (None, [])
    return Served(losses.tolist(), model.state(), log, staleness, sent)


def serve_or_work(
    group: Group,
    model: nn.Module,
    examples: tuple[np.ndarray, np.ndarray],
    settings: Settings,
    plan: Plan,
) -> tuple[Server | Worker, np.ndarray]:
    """Train a model on examples (inputs[n, ...], targets[n, ...]); return the role, and losses."""
    workers = workers_among(group.size, settings, plan)
    minibatches = Minibatches(*examples, settings, workers)
    role = join(group, model, rule(settings, plan, workers), plan)
    mine = minibatches.of(group.rank - plan.servers) if isinstance(role, Worker) else ()
    train(role, minibatches.backward, shown(mine, minibatches, group.rank == plan.servers))
    return role, group.all_reduce(minibatches.losses)


def replay(
    group: Group,
    model: nn.Module,
    examples: tuple[np.ndarray, np.ndarray],
    settings: Settings,
    plan: Plan,
    logs: list[list[list[Push]]],
) -> dict[str, np.ndarray] | None:
    """Return, on rank 0, the weights after the updates in the servers' logs, from the model's.

    Run it on as many ranks as trained. ValueError if a minibatch is not in each log exactly once.
    """
    if group.rank > 0:
        return None  # it only takes its share of the cores
    workers = workers_among(group.size, settings, plan)
    minibatches = Minibatches(*examples, settings, workers)
    dealt = {plan.servers + w: list(minibatches.of(w)) for w in range(workers)}
    optimizer = rule(settings, plan, workers)
    model = model.to(group.device)
    return replay_server(model, plan, logs, dealt, minibatches.backward, optimizer)


def workers_among(ranks: int, settings: Settings, plan: Plan) -> int:
    """Return W; ValueError if servers cannot keep such weights, or have too few workers."""
    if settings.on_mesh or settings.half or settings.reconstruction:
        raise ValueError(
            "servers keep whole float32 weights for workers that split the batch alone; use no "
            "other axis than dp, no ZeRO, no reconstruction, and precision float32"
        )
    return plan.workers(ranks)


class Minibatches:
    """The workers' parts of the batches: number n is worker n mod W's part of batch n // W.

    losses  of each batch, the sum over the parts that `backward` was called for
    """

    def __init__(self, inputs, targets, settings: Settings, workers: int):
        self.inputs, self.targets = inputs, targets
        self.settings, self.workers = settings, workers
        self.losses = np.zeros(settings.steps)
        how = {"seed": settings.seed, "shuffle": settings.shuffle}
        self.sampler = Sampler(len(self.inputs), settings.batch, **how)
        self.epoch = lru_cache(2)(self._epoch)  # it is drawn once for all its batches

    def _epoch(self, number: int) -> list[np.ndarray]:
        return [share.examples for share in self.sampler.epoch(number)]

    def of(self, worker: int) -> range:
        """Return the numbers of a worker's minibatches, in order; workers count from 0."""
        return range(worker, self.settings.steps * self.workers, self.workers)

    def examples(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples of minibatch n, perhaps none, and those of its whole batch."""
        step, worker = divmod(n, self.workers)
        number, batch = divmod(step, len(self.sampler))
        whole = self.epoch(number)[batch]
        return shard(whole, worker, self.workers), whole

    def backward(self, model: nn.Module, n: int) -> None:
        """Leave the gradient of minibatch n in the model, clipped."""
        step = n // self.workers
        mine, whole = self.examples(n)
        own, total = (nn.counted(self.targets[rows]) for rows in (mine, whole))
        randomness = Randomness(self.settings.seed, step, mine, len(whole))
        logits = model(self.inputs[mine], randomness)
        loss = model.loss(logits, self.targets[mine], total)
        loss.backward()
        optim.SGD(model.parameters(), lr=0.0).clip_global_norm(own / total)  # it only clips
        self.losses[step] += float(loss.data)
        if not math.isfinite(self.losses[step]):
            raise ValueError(f"the loss is {self.losses[step]} at step {step}; use a lower lr")


def shown(numbers, minibatches: Minibatches, here: bool) -> Iterator[int]:
    """Yield the numbers of minibatches, with a bar on one worker."""
    with progress_bar(len(numbers), 0 if here else 1) as bar:
        for n in numbers:
            yield n
            bar.set_postfix(loss=f"{minibatches.losses[n // minibatches.workers]:.3f}")
            bar.update()


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


def rule(settings: Settings, plan: Plan, workers: int) -> Callable[[list], Scheduled]:
    """Return the function from a server's parameters to its optimizer."""
    if plan.sparse:
        make = partial(optim.Adagrad, lr=TIMES_FOR_ADAGRAD * settings.lr)
    else:
        make = partial(optim.AdamW, lr=settings.lr, betas=(0.9, 0.98))
    return lambda parameters: Scheduled(make(parameters), updates_of(settings.steps, workers, plan))


def updates_of(steps: int, workers: int, plan: Plan) -> int:
    """Return how many updates a server does; with a quorum, if each had just enough workers.

    A slow worker does some more, with fewer than a quorum, when the others have finished.
    """
    if plan.quorum is not None:
        return -(-steps * workers // plan.quorum)
    if plan.staleness == 0:
        return steps
    first = -(-steps // plan.n_push)
    return workers * (first + ((steps - 1) % plan.n_push > 0))  # and one for the rest of the buffer


def save(group: Group, role: Server | Worker, losses: np.ndarray, folder: str, told: dict) -> None:
    """Save weights and optimizer, each server its slice, under the names of the model's arrays."""
    parts, of = whole_parts({LOSSES: losses}), None
    if isinstance(role, Server):
        optimizer = role.optimizer.optimizer
        parts += checkpoint.parts_of(role.model, optimizer)
        of = about(optimizer)
    said = {"told": told, "began": 0, "optimizer": of}
    checkpoint.save(folder, parts, len(losses), group, said)
