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
WAYS = {  # {name of the row: schedule, m, whether weights are last}
    f"{schedule}, m = {m}{', weights last' if last else ''}": (schedule, m, last)
    for m, schedule, last in product(MICRO_BATCHES, PEERS, (False, True))
}
WHOLE, ONE, BOTH = (
    "one process, whole batch",
    "one process, m = {}",
    "two independent processes, m = {}",
)


def rows(rounds: int = 3) -> Iterator[dict]:
    """Yield rows of one process, of two, and of pipelines."""
    with Cluster(1) as one, Cluster(2) as two:
        contest = rounds_of(
            rounds,
            ours=lambda: one.run(on_one)[0] | slowest(two.run(on_two)),
            PyTorch=peer("torch", "pipelines", "2"),
        )
    yield contest.row(WHOLE, WHOLE)
    for m in MICRO_BATCHES:
        for name in (ONE.format(m), BOTH.format(m)):
            yield contest.row(name, name)
        yield from (compared(contest, name) for name, way in WAYS.items() if m in way)


def compared(contest: Rounds, name: str) -> dict:
    """Compare a pipeline with one process, with what two cores can give, and with its peer."""
    schedule, m, _ = WAYS[name]
    one, both = (contest.seconds("ours", alone.format(m)) for alone in (ONE, BOTH))
    speed_up = middle(one / contest.seconds("ours", name))
    least = 0.85 * 2 * m / (m + 1) * middle(one / both)
    note = f"speed-up {speed_up:.2f}, at least {least:.2f}"
    return contest.row(name, name, "PyTorch", theirs=f"{schedule}, m = {m}", note=note)


def on_one(group: Group) -> Times:
    return timed(group, {WHOLE: (None, 1)} | {ONE.format(m): (None, m) for m in MICRO_BATCHES})


def on_two(group: Group) -> Times:
    return timed(group, {BOTH.format(m): (None, m) for m in MICRO_BATCHES} | WAYS)


def timed(group: Group, works: dict[str, tuple]) -> Times:
    return times_of(
        {name: partial(step_of, group, *way) for name, way in works.items()}, group.barrier
    )


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return X[B, C] and targets[B], the same in every process."""
    random = np.random.default_rng(0)
    return random.standard_normal((BATCH, WIDTH), np.float32), random.integers(0, WIDTH, BATCH)


def step_of(group: Group, schedule: str | None, m: int, weights_last=False) -> Step:
    """Return a step of m micro-batches: through a pipeline, or all in this process."""
    model, whole = nn.MLP([WIDTH] * (LAYERS + 1)), Batch(*batch())

    def accumulate() -> None:
        for part in whole.micro_batches(m):
            nn.cross_entropy(model(part.inputs), part.targets, BATCH).backward()

    parameters = model.parameters()
    backward: Step = accumulate
    if schedule is not None:
        pipeline = Pipeline(model, group, schedule, m, weights_last=weights_last)
        parameters, backward = pipeline.parameters(), partial(pipeline.backward, whole)

    def step() -> None:
        backward()
        for p in parameters:
            p.grad = None

    return step
