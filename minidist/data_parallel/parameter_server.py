"""Parameter servers: some ranks keep the weights, the others pull them and push gradients.

Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1 and algorithm 1.1 of its
appendix: Downpour SGD. Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server (NIPS 2013), section 2: bounded staleness.

Letters: S servers, the first ranks, and W workers, all others. The model's parameters, one after
the other, are a flat vector of P bytes; server k keeps its k-th slice. A slice's *version* is the
number of updates it has seen. A worker's *clock* is the number of minibatches it has done.

                   worker                        server
    pull           [PULL, clock]             ->  delayed while the plan says so
                   weights                   <-  slice, and its version
    push           [PUSH, clock, batch and   ->
                   version it was for, ...]
                   gradient                  ->  waits for its update, or is applied at once
    finish         [FINISH, clock, ...]      ->  and what is left in the buffer

    plan                          a pull for clock c is answered     an update is
    staleness=0, synchronous      when the last push is applied      one push of every worker
    staleness=s, bounded          when all have done c - s clocks    one push, when it arrives
    staleness=None, Downpour      at once                            one push, when it arrives
    quorum=q, semi-synchronous    when the last push is applied      one push of q workers or more

Semi-synchronous: the server does not wait for slow workers, unless they have missed s updates in a
row. A push must be for the newest version; the server declines a late one before its gradient is
sent. The worker then keeps the gradient in its buffer, goes on, and sends the sum another time.

Layouts: X[B/dp, ...] -> dW{+dp}, a partial sum at each worker -> push: dW's slices at the servers.
Bytes: P per pull from the servers, P per push from the workers, 2 W P per clock. The ledger counts
headers, too: 16 bytes per request, 16 per gradient that a push contains, 8 for the version of each
slice, 1 for the answer to a semi-synchronous push.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from operator import le

import numpy as np

from minidist import nn
from minidist.autograd.recording import Since
from minidist.backend import Array, array_module, on_device_of, to_host
from minidist.comm import Group
from minidist.errors import WrongInput, check_number
from minidist.nn.flat_parameters import FlatParameters, FlatSlice, check_flat
from minidist.nn.optim import Optimizer
from minidist.parallel import check_same_weights, check_statistics, norms_that_train
from minidist.pieces import split_ends

PULL, PUSH, FINISH = range(3)
HEAD, BODY = range(2)  # tags: what a message is about, and its payload
SERVED = "servers keep it until role.gather(), which train() calls; load weights before join()"


@dataclass(frozen=True)
class ServerPlan:
    """How ranks share the work; the same on all of them.

    servers         number of servers: the first ranks, each with a slice; the others are workers
    staleness       how many clocks a worker may be ahead of the slowest one (0: none; None: any
                    number); with a quorum, how many updates in a row a worker may miss
    quorum          how many workers suffice for an update (None: all if staleness is 0, else one)
    n_fetch, n_push minibatches from one pull to the next, and from one push to the next
    local_lr        learning rate with which a worker updates its own copy between pulls
    sparse          push only rows that are not zero; for optimizers that leave the others alone
    check_weights   whether the ranks first compare their weights (see check_same_weights)
    """

    servers: int = 1
    staleness: int | None = 0
    quorum: int | None = None
    n_fetch: int = 1
    n_push: int = 1
    local_lr: float = 0.0
    sparse: bool = False
    check_weights: bool = True

    def __post_init__(self):
        counts = {"servers": 1, "n_fetch": 1, "n_push": 1}
        counts |= {} if self.quorum is None else {"quorum": 1}
        counts |= {} if self.staleness is None else {"staleness": 0}
        for name, low in counts.items():
            allowed = f"{name} is a whole number from {low}"
            check_number(allowed, getattr(self, name), partial(le, low), Integral)
        free = self.staleness is None and self.quorum is None
        if not free and (self.n_fetch, self.n_push, self.local_lr) != (1, 1, 0):
            raise WrongInput(
                "n_fetch, n_push and local_lr are Downpour's: use staleness=None without a quorum; "
                "under any other plan a worker pulls and pushes at every clock"
            )

    def workers(self, ranks: int) -> int:
        """Return how many ranks work; ValueError if none does, or fewer than a quorum."""
        if ranks <= self.servers:
            raise WrongInput(
                f"{self.servers} servers on {ranks} ranks leave no worker; "
                f"use {self.servers + 1} ranks or more, or fewer servers"
            )
        workers = ranks - self.servers
        if self.quorum is not None and self.quorum > workers:
            raise WrongInput(
                f"quorum={self.quorum} of {workers} workers is never reached; use {workers} or "
                f"fewer, or {self.servers + self.quorum} ranks or more"
            )
        return workers


def check_fixed_statistics(model: nn.Module) -> None:
    """Raise ValueError if a BatchNorm trains: its worker would move what no server has."""
    for norm in norms_that_train(model):
        raise WrongInput(
            f"{norm.name} moves its running statistics on the worker that uses them, and no "
            "server has them; use model.eval() to train with fixed ones, or average gradients "
            "(data_parallel/naive.py)"
        )


class Member:
    """What servers and workers have in common: the model as one flat vector, and their group."""

    def __init__(self, group: Group, model: nn.Module, plan: ServerPlan):
        workers = plan.workers(group.size)  # raises if none does
        check_fixed_statistics(model)
        check_statistics(model, workers)
        self.flat = FlatParameters([p for p in model.parameters() if p.requires_grad])
        if plan.check_weights:
            check_same_weights(model, group)
        self.group, self.model, self.plan = group.split(0), model, plan
        self.group.all_gather(np.zeros(0), label=str(plan))  # one plan everywhere, or an error
        ends = split_ends(self.flat.size, plan.servers)
        self.slices = [slice(*ends[k : k + 2]) for k in range(plan.servers)]
        self.blocks = [Blocks(self.flat, s.start, s.stop) for s in self.slices if plan.sparse]

    def gather(self) -> None:
        """Write the servers' weights into every rank's model."""
        served = [*self.slices, slice(0, 0)][min(self.group.rank, self.plan.servers)]
        self.flat.vector[...] = self.group.all_gather(self.flat.vector[served])
        self.flat.changed()
        for p in self.flat.parameters:
            p.placement.elsewhere = None


@dataclass(frozen=True)
class Push:
    """What a worker sends at once: the sum of the gradients of these minibatches.

    versions  for each minibatch, the version of this server's slice that its gradient is for
    """

    worker: int
    batches: tuple[int, ...]
    versions: tuple[int, ...]


Waiting = tuple[Push, Array]  # a push that waits for its update, and its gradient


class Server(Member):
    """A slice of the weights, its optimizer, and a loop that takes one request after the other.

    slice    this server's weights
    version  how many updates they have seen
    log      for each update, the pushes that were added up, in the order of summation
    clocks   {worker: minibatches done}, counting those whose pushes have arrived
    """

    def __init__(self, group: Group, model: nn.Module, plan: ServerPlan, optimizer: Callable):
        super().__init__(group, model, plan)
        mine = self.slices[self.group.rank]
        self.slice = nn.Parameter(self.flat.vector[mine], f"slice {self.group.rank}")
        cuts = FlatSlice(self.flat, mine.start, mine.stop).slices
        self.slice.placement.cuts = cuts  # for checkpoints
        self.version = 0
        if plan.servers > 1:
            self.slice.placement.spread = (
                f"{plan.servers} servers, none of which has the whole gradient: "
                "use ServerPlan(servers=1)"
            )
        FlatParameters([self.slice])  # copies
        for p in self.flat.parameters:
            p.placement.elsewhere = SERVED
        self.optimizer: Optimizer = optimizer([self.slice])
        self.workers = list(range(plan.servers, self.group.size))
        self.quorum = len(self.workers) if plan.staleness == 0 else plan.quorum
        self.log: list[list[Push]] = []
        self.working, self.turns = set(self.workers), deque(self.workers)
        self.waiting: dict[int, deque[Waiting]] = {w: deque() for w in self.workers}
        self.clocks = dict.fromkeys(self.workers, 0)
        self.taken = dict.fromkeys(self.workers, 0)  # the version after each one's last push
        self.pulls: dict[int, int] = {}  # worker: the clock that it wants to begin

    def serve(self) -> "Server":
        """Answer requests until every worker has finished."""
        while self.working:
            self._take()
            while due := self._due():
                self._update([self.waiting[w].popleft() for w in due])
            for worker, clock in list(self.pulls.items()):
                if self._may_read(worker, clock):
                    del self.pulls[worker]
                    self.group.send(self.slice.data, worker, BODY)
                    self.group.send(np.array(self.version), worker, HEAD)
        self.flat.vector[self.slices[self.group.rank]] = self.slice.data
        return self

    def _take(self) -> None:
        """Take one request; of several workers that wait, serve the one served longest ago."""
        worker, head = self.group.recv_any([w for w in self.turns if w in self.working], HEAD)
        self.turns.remove(worker)
        self.turns.append(worker)
        kind, clock, *rest = head.tolist()
        if kind == PULL:
            self.pulls[worker] = clock
            return
        batches, versions = tuple(rest[::2]), tuple(rest[1::2])
        if kind == PUSH and self.plan.quorum is not None:
            in_time = versions[-1] == self.version
            self.group.send(np.array(in_time), worker, HEAD)
            if not in_time:
                return
        self.clocks[worker] = clock
        if batches:
            self.waiting[worker].append((Push(worker, batches, versions), self._gradient(worker)))
        if kind == FINISH:
            self.working.discard(worker)

    def _gradient(self, worker: int):
        """Receive a gradient: an array, or (positions, elements) if it is sparse."""
        body = self.group.recv(worker, BODY)
        if not self.plan.sparse:
            return body
        return self.blocks[self.group.rank].positions(body), self.group.recv(worker, BODY)

    def _due(self) -> list[int]:
        """Return the workers whose oldest pushes make the next update; none if it is not due."""
        here = [w for w in self.workers if self.waiting[w]]
        if self.quorum is None:
            return here[:1]
        absent = [w for w in self.working if not self.waiting[w]]
        missed = max((self.version - self.taken[w] for w in absent), default=-1)
        patient = self.plan.staleness is None or missed < self.plan.staleness
        enough = len(here) >= min(self.quorum, len(here) + len(absent))
        return here if patient and enough else []

    def _may_read(self, worker: int, clock: int) -> bool:
        """Return whether the plan lets a worker begin this clock."""
        if self.quorum is not None:
            return not self.waiting[worker]
        if self.plan.staleness is None:
            return True
        return min(self.clocks[w] for w in self.working) >= clock - self.plan.staleness

    def _update(self, pushes: list[tuple]) -> None:
        """Apply the sum of these pushes, count it, and log it."""
        if self.plan.sparse:
            self.optimizer.step_at(*add_up([gradient for _, gradient in pushes]))
        else:
            total, *others = [gradient for _, gradient in pushes]
            for gradient in others:
                total += gradient
            self.slice.grad = total
            self.optimizer.step()
        self.version += 1
        self.log.append([push for push, _ in pushes])
        for push, _ in pushes:
            self.taken[push.worker] = self.version

    def staleness(self) -> list[int]:
        """Return, per gradient, how many updates came between its version and its own update."""
        return [
            update - version
            for update, pushes in enumerate(self.log)
            for push in pushes
            for version in push.versions
        ]


class Worker(Member):
    """A copy of the weights, and a buffer for gradients on their way to the servers.

        worker.pull()
        loss(batch).backward()
        worker.add(batch)
        worker.push()
        ...
        worker.finish()

    versions  per slice, the version that was pulled last
    pending   per slice, [(batch, version), ...] of the gradients in the buffer
    pushed    per slice, how many pushes were sent and accepted
    """

    def __init__(self, group: Group, model: nn.Module, plan: ServerPlan):
        super().__init__(group, model, plan)
        self.buffer = array_module(self.flat.vector).zeros_like(self.flat.vector)
        self.versions, self.clock = [0] * plan.servers, 0
        self.pending: list[list[tuple[int, int]]] = [[] for _ in self.slices]
        self.pushed = [0] * plan.servers
        self.pulled = Since(self.flat.last_changed)

    def pull(self) -> None:
        """Get the newest weights that the plan allows, as soon as it allows them."""
        if self.pulled.behind():
            raise WrongInput(f"weights that a worker loads would be lost: {SERVED}")
        for server in range(self.plan.servers):
            self.group.send(np.array([PULL, self.clock]), server, HEAD)
        for server, part in enumerate(self.slices):
            weights, version = self.group.recv(server, BODY), self.group.recv(server, HEAD)
            self.versions[server] = int(version)
            self.flat.vector[part] = on_device_of(weights, self.flat.vector)
        self.flat.changed()
        self.pulled.follow()

    def add(self, batch: int) -> None:
        """Add the model's gradient, of minibatch `batch`, to the buffer; drop it in the model."""
        check_flat(self.model.parameters(), [self.flat])
        self.flat.collect_gradients()
        for part, pending, version in zip(self.slices, self.pending, self.versions, strict=True):
            if pending:
                self.buffer[part] += self.flat.gradient[part]
            else:
                self.buffer[part] = self.flat.gradient[part]
            pending.append((batch, version))
        if self.plan.local_lr:
            self.flat.vector -= self.plan.local_lr * self.flat.gradient
        for p in self.flat.parameters:
            p.grad = None
        self.clock += 1

    def push(self) -> None:
        """Send the buffer; what a server declines stays in it."""
        servers = range(self.plan.servers)
        for server in servers:
            self._send_head(PUSH, server)
        for server in servers:
            if self.plan.quorum is None or self.group.recv(server, HEAD):
                self._send_buffer(server)

    def finish(self) -> None:
        """Send what is left in the buffer, and say that nothing more will come."""
        for server in range(self.plan.servers):
            self._send_head(FINISH, server)
            if self.pending[server]:
                self._send_buffer(server)

    def _send_head(self, kind: int, server: int) -> None:
        flat = [number for pair in self.pending[server] for number in pair]
        self.group.send(np.array([kind, self.clock, *flat]), server, HEAD)

    def _send_buffer(self, server: int) -> None:
        gradient = self.buffer[self.slices[server]]
        arrays = self.blocks[server].pack(gradient) if self.plan.sparse else (gradient,)
        for array in arrays:
            self.group.send(array, server, BODY)
        self.pending[server] = []
        self.pushed[server] += 1


def join(group: Group, model: nn.Module, optimizer: Callable, plan: ServerPlan) -> Server | Worker:
    """Return this rank's role under the plan; optimizer: parameters -> Optimizer, for servers."""
    if group.rank < plan.servers:
        return Server(group, model, plan, optimizer)
    return Worker(group, model, plan)


def train(
    role: Server | Worker, backward: Callable[[nn.Module, int], None], batches: Iterable[int]
) -> Server | Worker:
    """Serve, or work on these minibatches (the loop of Downpour's algorithm 1.1); then gather.

    backward(model, batch) computes the gradients of minibatch number `batch`, in the parameters.
    """
    if isinstance(role, Server):
        role.serve()
    else:
        for step, batch in enumerate(batches):
            if step % role.plan.n_fetch == 0:
                role.pull()
            backward(role.model, batch)
            role.add(batch)
            if step % role.plan.n_push == 0:
                role.push()
        role.finish()
    role.gather()
    return role


class Blocks:
    """The rows of all parameters in elements start to stop of a flat vector, for sparse updates.

    A batch of B T tokens touches at most B T of an embedding's V rows. The gradients of all other
    rows are zero, and a server whose optimizer leaves such rows alone does not need them.

        weight[V, C]  ->  blocks of C elements        bias[C]  ->  one block
        message       ->  numbers of the touched blocks, int64, and then the elements of these

    Li et al., Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014), section
    3.2, send a range of (key, value) pairs in the same way.

    ends  where each row begins and ends, counted from `start`; rows are cut at start and stop
    """

    def __init__(self, flat: FlatParameters, start: int, stop: int):
        ends = {start, stop}
        for offset, shape, p in zip(flat.offsets, flat.shapes, flat.parameters, strict=True):
            row = max(1, shape[-1] if len(shape) > 1 else p.size)
            ends.update(end for end in range(offset, offset + p.size, row) if start < end < stop)
        self.ends = np.array(sorted(ends)) - start
        self.sizes = np.diff(self.ends)

    def pack(self, gradient: Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the blocks that are not all zeros, and their elements."""
        gradient = to_host(gradient)
        if not len(gradient):
            return np.zeros(0, np.int64), gradient
        touched = np.logical_or.reduceat(gradient != 0, self.ends[:-1])
        return np.flatnonzero(touched), gradient[np.repeat(touched, self.sizes)]

    def positions(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions of the elements of these blocks."""
        if not len(numbers):
            return np.zeros(0, np.int64)
        return np.concatenate([np.arange(self.ends[n], self.ends[n + 1]) for n in numbers])


def add_up(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Add sparse vectors, each (positions, elements), in this order; return one such pair."""
    everywhere = np.unique(np.concatenate([positions for positions, _ in parts]))
    total = np.zeros(len(everywhere), parts[0][1].dtype)
    for positions, elements in parts:
        total[np.searchsorted(everywhere, positions)] += elements
    return everywhere, total
