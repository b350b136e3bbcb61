"""Ranks that wait for each other, step by step: small programs, in an order drawn by a seed.

One rank runs at a time (comm/local/threads.py). A step ends where it is about to communicate,
has to wait, or has finished: then the line and the wait of every rank are noted.
"""

import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.comm import Cluster, Group
from minidist.comm.fabric import Fabric
from minidist.comm.local.threads import Interleaving, ThreadRanks
from minidist.errors import CommError, check_name


def ring_of_rendezvous(group: Group) -> None:
    """Without a buffer a send waits until it is received; here all send first."""
    right, left = (group.rank + 1) % 4, (group.rank - 1) % 4
    group.send(np.ones(1), right)
    group.recv(right, tag=1)  # "I have it": what such a send waits for
    group.recv(left)
    group.send(np.ones(1), left, tag=1)


def one_rank_skips(group: Group) -> None:
    """Rank 2 has no gradient, so it does not join the sum."""
    if group.rank != 2:
        group.all_reduce(np.ones(1), label="gradients")
    group.barrier(label="end of the step")


def whoever_is_first(group: Group) -> None:
    """Rank 0 takes what comes first, and believes that it came from rank 2: a race."""
    if group.rank == 0:
        group.recv_any([1, 2])
        group.recv(1)
    else:
        group.send(np.ones(1), 0)


SIZES = {ring_of_rendezvous: 4, one_rank_skips: 3, whoever_is_first: 3}
PROGRAMS = {program.__name__: program for program in SIZES}


class Noted(Interleaving):
    """An Interleaving that notes its steps: which rank ran, and where every rank is then."""

    def __init__(self, fabrics: list[Fabric], seed: int | None):
        super().__init__(len(fabrics), f"{seed} 1")  # as the first run of a cluster has it
        self.fabrics, self.steps, self.lines = fabrics, list[dict](), dict[int, int]()
        self.over = False  # since a collective did not match, or the ranks have been stopped

    def wait_until(self, rank: int, condition: Callable[[], bool]) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_name not in PROGRAMS:
            self.over |= frame.f_code.co_name == "explain"  # a collective did not match
            frame = frame.f_back
        if frame is not None:  # else the worker has not begun
            self.lines[rank] = frame.f_lineno - frame.f_code.co_firstlineno
            self.note(rank, self.left)
        super().wait_until(rank, condition)

    def leave(self, rank: int) -> None:
        self.lines.pop(rank, None)
        self.note(rank, self.left | {rank})
        super().leave(rank)

    def note(self, rank: int, done: set[int]) -> None:
        ranks = [state(fabric, fabric.rank in done) for fabric in self.fabrics]
        self.over |= any(fabric.mailbox.closed for fabric in self.fabrics)
        if not self.over:
            step = {"ran": rank, "lines": dict(self.lines), "ranks": ranks, "lit": lit(ranks)}
            self.steps.append(step)


def state(fabric: Fabric, done: bool) -> dict:
    """Return a rank's wait in words, and the ranks that it is "for": none where it can go on."""
    rows = [row for row in fabric.snapshot().rows if row.sources]
    if done or not rows:
        return {"words": "has finished" if done else "can go on", "for": []}
    description = f"waits in {rows[0].operation.partition('(')[0]}"
    return {"words": description, "for": list(rows[0].sources)}


def lit(ranks: list[dict]) -> list[list[int]]:
    """Return the waits [rank, for rank] that never end: in a cycle, or for one that is done."""
    reached = {rank: set(one["for"]) for rank, one in enumerate(ranks)}
    for _ in ranks:
        for others in reached.values():
            others.update(*[reached[rank] for rank in others])
    waits = [(rank, other) for rank, one in enumerate(ranks) for other in one["for"]]
    done = [rank for rank, one in enumerate(ranks) if one["words"] == "has finished"]
    return [[rank, other] for rank, other in waits if rank in reached[other] or other in done]


class NotedRanks(ThreadRanks):
    def __init__(self, size: int, device: str, seed: int | None):
        super().__init__(size, device, seed)
        self.noted = Noted(self.fabrics, seed)

    def _serve(self, *run) -> None:
        self.turns = self.noted
        super()._serve(*run)


class NotedCluster(Cluster):
    """A cluster of NotedRanks, for one run."""

    def _new_ranks(self) -> NotedRanks:
        ranks = NotedRanks(self.size, self.device, self.interleaving)
        self.steps = ranks.noted.steps
        return ranks


def stepped(name: str, seed: int) -> dict:
    """Run a program; return its steps, and how it ends, as the package says it."""
    with NotedCluster(SIZES[PROGRAMS[name]], "thread", interleaving=seed) as cluster:
        verdict, message = "finishes", "every rank has finished"
        try:
            cluster.run(PROGRAMS[name])
        except CommError as error:
            verdict, message = type(error).__name__, str(error)
    return {"verdict": verdict, "words": message, "steps": cluster.steps}


def answer(name: str) -> dict:
    """Return the lines of a program, and its steps with each of 8 seeds."""
    check_name("program", name, PROGRAMS)
    with threadpool_limits(1), ThreadPoolExecutor(8) as threads:
        seeds = list(threads.map(partial(stepped, name), range(8)))
    lines = inspect.getsource(PROGRAMS[name]).splitlines()
    return {"program": name, "source": lines, "seeds": seeds}
