"""Measure a GPU: training steps and products against PyTorch's, and all_reduce against staging.

    step        of an MLP (SGD) and of a Transformer (AdamW), in float32, of B T rows or tokens
    product     of two square matrices: PyTorch's are cuBLAS' own rate
    all_reduce  between ranks of one GPU, in memory that all see through CUDA IPC, against copies
                through the host's memory ("staging")

In each round all of them run: ours on new ranks, PyTorch's in a process of its own, so that each
has the GPU's memory to itself. Times are the GPU's: medians of REPEATS calls, which are queued
without a wait. A ratio is the median over rounds of the ratios within a round.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from minidist import run
from minidist.backend import clock, matmul, to_device, why_no_gpu
from minidist.comm import Group
from minidist.events import Clock
from minidist.tools.bench import comm
from minidist.tools.bench.comm import comparison, line
from minidist.tools.bench.run_peer import torch_peer
from minidist.tools.bench.steps import mlp_step, transformer_step

__all__ = ["HEAD", "line", "measure"]

HEAD = comm.FORM.format("one GPU", "minidist", "peer", "", "ratio", "limit", "").rstrip()
REPEATS = 5
RANKS = (2, 4)


@dataclass(frozen=True)
class Sizes:
    """How large the work is: of the MLP and the Transformer, of a product, of an all_reduce."""

    width: int = 1024
    depth: int = 12
    heads: int = 16
    context: int = 1024
    batch: int = 8
    vocab: int = 16384
    product: int = 8192
    megabytes: int = 64

    def workloads(self, mlp: Callable, transformer: Callable, product: Callable) -> dict:
        """Return {name: a function that prepares this work and returns a call of it}."""
        widths, rows = [self.width] * (self.depth + 1), self.batch * self.context
        shape = self.vocab, self.width, self.heads, self.depth, self.context, self.batch
        return {
            "MLP step": partial(mlp, widths, rows),
            "Transformer step": partial(transformer, *shape),
            "product, float32": partial(product, self.product, "float32"),
            "product, float16": partial(product, self.product, "float16"),
        }


def measure(rounds: int = 5, sizes: Sizes | None = None) -> Iterator[dict]:
    """Return rows as in `comm.py`; ValueError where there is no GPU."""
    if reason := why_no_gpu():
        raise ValueError(f"there is no GPU to measure. {reason}")
    return _rows(rounds, sizes or Sizes())


def _rows(rounds: int, sizes: Sizes) -> Iterator[dict]:
    names = list(sizes.workloads(mlp_step, transformer_step, product))
    torch = torch_peer(names, "gpu", json.dumps(asdict(sizes)))
    ours, found = [], []
    for _ in range(rounds):
        ours += run(our_times, 1, sizes, device="gpu")
        found.append({"ours": ours[-1]["seconds"], "PyTorch": torch()})
    for name in names:
        row = comparison(name, found, name, "PyTorch", None)
        if name.startswith("product"):
            rate = 2e-9 * sizes.product**3 / row["ours_ms"]
            row["note"] = "; ".join(filter(None, [f"{rate:.3g} TFLOP/s", row["note"]]))
        yield row
    for name, words in ours[-1]["asks for"].items():
        empty = dict.fromkeys(["ours_ms", "peer", "peer_ms", "ratio", "limit"])
        yield {"name": f"{name} asks for", **empty, "note": words}
    for ranks in RANKS:
        found = [slowest(run(all_reduces, ranks, sizes, device="gpu:0")) for _ in range(rounds)]
        name = f"all_reduce {sizes.megabytes} MB, {ranks} ranks"
        yield comparison(name, found, "all_reduce", "staging", None)


def our_times(group: Group, sizes: Sizes) -> dict[str, dict]:
    """Return the seconds of each workload, and in words what a step asks of the GPU."""
    device = group.device
    steps = [partial(step, device=device) for step in (mlp_step, transformer_step)]
    workloads = sizes.workloads(*steps, partial(product, device=device))
    seconds = times(workloads, clock(device))
    asked = {name: asks_for(make()) for name, make in workloads.items() if name.endswith("step")}
    return {"seconds": seconds, "asks for": asked}


def times(workloads: dict[str, Callable[[], Callable]], timer: Clock) -> dict[str, float]:
    """Return the median seconds of a call of each workload, by a device's clock."""
    spans = {name: [] for name in workloads}
    for name, make in workloads.items():
        call = make()
        for _ in range(2):  # compiles kernels, and takes memory
            call()
        for _ in range(REPEATS):
            start = timer.now()
            call()
            spans[name].append((start, timer.now()))
        del call  # and its memory, before the next one is made
    return medians(timer, spans)


def medians(timer: Clock, spans: dict[str, list[tuple]]) -> dict[str, float]:
    """Return the median seconds between a clock's (start, stop) of each name."""
    return {
        name: statistics.median(timer.seconds(stop) - timer.seconds(start) for start, stop in each)
        for name, each in spans.items()
    }


def product(size: int, dtype: str, device: str) -> Callable:
    """Return a call that multiplies two matrices of this size."""
    random = np.random.default_rng(0)
    a, b = (to_device(random.random((size, size), np.float32), device) for _ in range(2))
    return partial(matmul, a.astype(dtype), b.astype(dtype))


def asks_for(step: Callable) -> str:
    """Return in words the copies, waits and kernel launches of a step, if they can be counted."""
    step()
    try:
        from minidist.tools.bench import torch_eager

        return in_words(torch_eager.profiled(step))
    except Exception as error:  # CuPy counts nothing; the profiler is PyTorch's
        return f"not counted, which needs PyTorch's profiler: {type(error).__name__}: {error}"


def in_words(events: list[tuple[str, bool]]) -> str:
    """Sum up what `torch_eager.profiled` has seen; ValueError if that is nothing."""
    work = [name for name, on_gpu in events if on_gpu]
    if not work:
        raise ValueError("it has seen no work of the GPU")
    up, down = (sum(way in name for name in work) for way in ("HtoD", "DtoH"))
    waits = sum("Synchronize" in name for name, on_gpu in events if not on_gpu) - 1
    launches = len(work) - up - down
    return f"{up} copies to the GPU, {down} to the host, {waits} waits, {launches} launches"


def all_reduces(group: Group, sizes: Sizes) -> dict[str, float]:
    """Return the seconds of an all_reduce in memory that the ranks share, and through the host's.

    The first is missing if the ranks cannot share the GPU's memory.
    """
    staged, timer, spans = group.split(0), clock(group.device), {}
    staged.communicator.device_memory = None
    ways = {"staging": staged}
    if group.communicator.device_memory is not None:
        ways["all_reduce"] = group
    x = group.empty(sizes.megabytes << 18)
    x[...] = 1
    for name, ranks in ways.items():
        ranks.all_reduce(x, out=x)
        spans[name] = []
        for _ in range(REPEATS):
            ranks.barrier()
            start = timer.now()
            ranks.all_reduce(x, out=x)
            spans[name].append((start, timer.now()))
    return medians(timer, spans)


def slowest(found: list[dict[str, float]]) -> dict[str, dict[str, float] | str]:
    """Return the longest times over the ranks, of an all_reduce in shared memory and staged."""
    seconds = {name: max(times[name] for times in found) for name in found[0]}
    staged = {"all_reduce": seconds["staging"]}
    if "all_reduce" not in seconds:
        return {"ours": staged, "staging": "staged: the ranks cannot share the GPU's memory"}
    return {"ours": seconds, "staging": staged}
