"""Time training steps against PyTorch eager: one BLAS thread, float32, in turns."""

import json
from collections.abc import Iterator
from functools import partial

from minidist.backend import keep_freed_memory
from minidist.bench import workloads
from minidist.bench.rows import rounds_of, times_of
from minidist.bench.run_peer import torch_peer
from minidist.bench.workloads import STEPS, makers

TITLE = "one BLAS thread, float32"
LIMITS = dict(zip(STEPS, (1.5, 2.0, 2.0, 3.0, 1.0), strict=True))


def rows(rounds: int = 5) -> Iterator[dict]:
    """Yield a row per workload."""
    keep_freed_memory()
    ours = partial(times_of, makers(workloads, STEPS))
    torch = torch_peer("steps", "cpu", json.dumps(STEPS))
    found = rounds_of(rounds, ours=ours, PyTorch=torch)
    for name in STEPS:
        yield found.row(name, name, "PyTorch", LIMITS[name])
