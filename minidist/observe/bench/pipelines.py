"""Measure pipelines on two ranks against one process, and against PyTorch's schedules over gloo.

The work: forward and backward of an MLP of 8 layers, width 1024, batch 256, cut into m
micro-batches; float32, one BLAS thread per process. One process that accumulates the same m
micro-batches takes T. Two such processes side by side, each with all the work, take T' each, so
this machine's two cores are worth 2 T / T' of one. A pipeline of two stages can be at most
2 m / (m + 1) times as fast as one process; of that, the machine allows at most T / T'.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from minidist import Cluster, nn
from minidist.comm import Group
from minidist.nn.datasets import Batch
from minidist.observe.bench.table import (
    Rounds,
    Step,
    Times,
    middle,
    peer,
    rounds_of,
    slowest,
    times_of,
)
from minidist.pipeline_parallel import Pipeline

TITLE = "two ranks, float32"
WIDTH, LAYERS, BATCH = 1024, 8, 256
MICRO_BATCHES = (4, 8)
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
ONE, BOTH = "one process, m = {}", "two independent processes, m = {}"


class Work(NamedTuple):
    """Forward and backward of m micro-batches: through a pipeline, or all of them in each rank."""

    ranks: int
    m: int
    schedule: str | None = None
    weights_last: bool = False


WORKS = {"one process, whole batch": Work(1, 1)}
for m in MICRO_BATCHES:
    WORKS |= {ONE.format(m): Work(1, m), BOTH.format(m): Work(2, m)}
    for schedule, last in product(PEERS, (False, True)):
        name = f"{schedule}, m = {m}{', weights last' if last else ''}"
        WORKS[name] = Work(2, m, schedule, last)


def rows(rounds: int = 3) -> Iterator[dict]:
    """Yield rows of one process, of two, and of pipelines."""
    with Cluster(1) as one, Cluster(2) as two:
        contest = rounds_of(
            rounds,
            ours=lambda: one.run(times)[0] | slowest(two.run(times)),
            PyTorch=peer("torch", "pipelines", "2"),
        )
    for name, work in WORKS.items():
        yield compared(contest, name) if work.schedule else contest.row(name, name)


def compared(contest: Rounds, name: str) -> dict:
    """Compare a pipeline with one process, with what two cores can give, and with its peer."""
    _, m, schedule, _ = WORKS[name]
    one, both = (contest.seconds("ours", alone.format(m)) for alone in (ONE, BOTH))
    speed_up = middle(one / contest.seconds("ours", name))
    least = 0.85 * 2 * m / (m + 1) * middle(one / both)
    note = f"speed-up {speed_up:.2f}, at least {least:.2f}"
    return contest.row(name, name, "PyTorch", theirs=f"{schedule}, m = {m}", note=note)


def times(group: Group) -> Times:
    works = {n: partial(step_of, group, w) for n, w in WORKS.items() if w.ranks == group.size}
    return times_of(works, group.barrier)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return X[B, C] and targets[B], the same in every process."""
    random = np.random.default_rng(0)
    return random.standard_normal((BATCH, WIDTH), np.float32), random.integers(0, WIDTH, BATCH)


def step_of(group: Group, work: Work) -> Step:
    model, examples = nn.MLP([WIDTH] * (LAYERS + 1)), Batch(*batch())

    def accumulate() -> None:
        for part in examples.micro_batches(work.m):
            nn.cross_entropy(model(part.inputs), part.targets, BATCH).backward()

    parameters = model.parameters()
    backward: Step = accumulate
    if work.schedule is not None:
        pipeline = Pipeline(model, group, work.schedule, work.m, weights_last=work.weights_last)
        parameters, backward = pipeline.parameters(), partial(pipeline.backward, examples)

    def step() -> None:
        backward()
        for p in parameters:
            p.grad = None

    return step
