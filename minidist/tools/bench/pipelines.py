"""Measure pipelines on two ranks against one process, and against PyTorch's schedules over gloo.

The work: forward and backward of an MLP of 8 layers, width 1024, batch 256, cut into m
micro-batches; float32, one BLAS thread per process. One process that accumulates the same m
micro-batches takes T. Two such processes side by side, each with all the work, take T' each, so
this machine's two cores are worth 2 T / T' of one. A pipeline of two stages can be at most
2 m / (m + 1) times as fast as one process; of that, the machine allows at most T / T'. Contestants
take turns within a round; a ratio is the median over rounds of the ratios within a round.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn
from minidist.pipeline_parallel import Pipeline
from minidist.tools.bench.comm import median_seconds
from minidist.tools.bench.run_peer import torch_peer, why_not

WIDTH, LAYERS, BATCH = 1024, 8, 256
MICRO_BATCHES = (4, 8)
REPEATS = 5
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return X[B, C] and targets[B], the same in every process."""
    random = np.random.default_rng(0)
    return random.standard_normal((BATCH, WIDTH), np.float32), random.integers(0, WIDTH, BATCH)


def accumulate(group, m: int) -> float:
    """Return the median seconds of the m micro-batches, one after the other in this process."""
    model, (x, y) = nn.MLP([WIDTH] * (LAYERS + 1)), batch()

    def step():
        for part in np.array_split(np.arange(BATCH), m):
            nn.cross_entropy(model(x[part]), y[part], BATCH).backward()
        for p in model.parameters():
            p.grad = None

    with threadpool_limits(1):
        return median_seconds(step, group.barrier, REPEATS)


def pipelined(group, schedule: str, m: int, weights_last: bool) -> float:
    """Return the median seconds of one step through a pipeline on this group's ranks."""
    model, (x, y) = nn.MLP([WIDTH] * (LAYERS + 1)), batch()
    pipeline = Pipeline(model, group, schedule, m, weights_last=weights_last)

    def step():
        pipeline.backward(x, y)
        for p in pipeline.parameters():
            p.grad = None

    with threadpool_limits(1):
        return median_seconds(step, group.barrier, REPEATS)


def measure(rounds: int = 3) -> Iterator[dict]:
    """Yield rows: name, ours_ms, speedup, least (what it should be), the peer's ratio, note."""
    torch = torch_peer([f"{name} {m}" for m in MICRO_BATCHES for name in PEERS], "pipelines", "2")
    with Cluster(1) as one, Cluster(2) as two:
        found = [_round(one, two) | {"torch": torch()} for _ in range(rounds)]
    yield _plain(found, "one process, whole batch", "whole")
    for m in MICRO_BATCHES:
        yield _plain(found, f"one process, m = {m}", f"accumulate {m}")
        yield _plain(found, f"two independent processes, m = {m}", f"both {m}")
        for schedule in PEERS:
            for last in (False, True):
                yield _row(found, schedule, m, last)


def _round(one: Cluster, two: Cluster) -> dict[str, float]:
    """Return {contestant: seconds}; measure each of our contestants once."""
    found = {"whole": one.run(accumulate, 1)[0]}
    for m in MICRO_BATCHES:
        found[f"accumulate {m}"] = one.run(accumulate, m)[0]
        found[f"both {m}"] = max(two.run(accumulate, m))
        for schedule in PEERS:
            for last in (False, True):
                seconds = max(
                    two.run(partial(pipelined, schedule=schedule, m=m, weights_last=last))
                )
                found[f"{schedule} {m} {last}"] = seconds
    return found


def _plain(found: list[dict], name: str, key: str) -> dict:
    seconds = statistics.median(f[key] for f in found)
    empty = dict.fromkeys(["speedup", "least", "peer"])
    return {"name": name, "ours_ms": 1e3 * seconds, **empty, "note": ""}


def _row(found: list[dict], schedule: str, m: int, last: bool) -> dict:
    """Compare a pipeline with one process, with what two cores can give, and with its peer."""
    key, peer = f"{schedule} {m} {last}", f"{schedule} {m}"
    speedup = statistics.median(f[f"accumulate {m}"] / f[key] for f in found)
    gain = statistics.median(f[f"accumulate {m}"] / f[f"both {m}"] for f in found)
    name = f"{schedule}, m = {m}" + (", weights last" if last else "")
    row = _plain(found, name, key) | {"speedup": speedup, "least": 0.85 * 2 * m / (m + 1) * gain}
    if reason := why_not(f["torch"] for f in found):
        return row | {"note": reason}
    return row | {"peer": statistics.median(f[key] / f["torch"][peer] for f in found)}


FORM = "{:<38}{:>10}{:>10}{:>10}{:>14}  {}"
HEAD = FORM.format(
    "two ranks, float32", "minidist", "speed-up", "at least", "over PyTorch", ""
).rstrip()


def line(row: dict) -> str:
    """Return a row of `measure` for people."""
    cells = [row["name"], f"{row['ours_ms']:.0f} ms"]
    for key in ("speedup", "least", "peer"):
        cells.append("" if row[key] is None else f"{row[key]:.2f}")
    return FORM.format(*cells, row["note"]).rstrip()
