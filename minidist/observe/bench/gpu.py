"""Measure a GPU: training steps and products against PyTorch's, and all_reduce against staging.

    step        of an MLP (SGD) and of a Transformer (AdamW), in float32, of B T rows or tokens
    product     of two square matrices: PyTorch's are cuBLAS' own rate
    all_reduce  between ranks of one GPU, in memory that all see through CUDA IPC, against copies
                through the host's memory ("staging")

In each round all of them run: ours on new ranks, PyTorch's in a process of its own, so that each
has the GPU's memory to itself. Times are the GPU's: medians of calls that are queued without a
wait.
"""

import json
from collections.abc import Iterator
from functools import partial

from minidist import run
from minidist.backend import clock, why_no_gpu
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.observe.bench import steps
from minidist.observe.bench.steps import GPU_SIZES, Work, gpu_works, makers
from minidist.observe.bench.table import (
    Answer,
    Rounds,
    Step,
    Times,
    middle,
    peer,
    remark,
    rounds_of,
    slowest,
    times_of,
)

TITLE = "one GPU"


def rows(rounds: int = 5, sizes: dict[str, int] | None = None) -> Iterator[dict]:
    """Return an iterator over rows; ValueError where there is no GPU.

    sizes  those of steps.GPU_SIZES that are not as usual
    """
    if reason := why_no_gpu():
        raise WrongInput(f"there is no GPU to measure. {reason}")
    usual = {name: size for name, (size, *_) in GPU_SIZES.items()}
    return (row | {"processor": "GPU"} for row in measured(rounds, usual | (sizes or {})))


def measured(rounds: int, sizes: dict[str, int]) -> Iterator[dict]:
    works = gpu_works(sizes)
    contest = rounds_of(
        rounds,
        ours=lambda: run(our_times, 1, works, device="gpu")[0],
        PyTorch=peer("torch", "steps", "cuda", json.dumps(works)),
    )
    for name in works:
        rate = 2e-12 * sizes["product"] ** 3 / middle(contest.seconds("ours", name))
        note = f"{rate:.3g} TFLOP/s" if name.startswith("product") else ""
        yield contest.row(name, name, "PyTorch", note=note)
    for name, description in run(requests, 1, works, device="gpu")[0].items():
        yield remark(f"{name} asks for", description)
    for ranks in (2, 4):
        runs = [run(all_reduces, ranks, sizes, device="gpu:0") for _ in range(rounds)]
        name = f"all_reduce {sizes['megabytes']} MB, {ranks} ranks"
        yield Rounds(map(shared_and_staged, runs)).row(name, "all_reduce", "staging")


def our_times(group: Group, works: dict[str, Work]) -> Times:
    """Return the seconds of each workload, by the GPU's clock."""
    ours = makers(steps, works, device=group.device)
    return times_of(ours, clock=partial(clock, group.device))


def requests(group: Group, works: dict[str, Work]) -> dict[str, str]:
    """Return in words what each step asks of the GPU."""
    ours = makers(steps, works, device=group.device)
    return {name: asks_for(make()) for name, make in ours.items() if name.endswith("step")}


def asks_for(step: Step) -> str:
    """Return in words the copies, waits and kernel launches of a step, if they can be counted."""
    step()
    try:
        from minidist.observe.bench import torch_peers

        return in_words(torch_peers.profiled(step))
    except Exception as error:  # CuPy counts nothing; the profiler is PyTorch's
        return f"not counted, which needs PyTorch's profiler: {type(error).__name__}: {error}"


def in_words(events: list[tuple[str, bool]]) -> str:
    """Sum up what `torch_peers.profiled` has seen; ValueError if that is nothing."""
    work = [name for name, on_gpu in events if on_gpu]
    if not work:
        raise WrongInput("it has seen no work of the GPU")
    up, down = (sum(way in name for name in work) for way in ("HtoD", "DtoH"))
    waits = sum("Synchronize" in name for name, on_gpu in events if not on_gpu) - 1
    launches = len(work) - up - down
    return f"{up} copies to the GPU, {down} to the host, {waits} waits, {launches} launches"


def all_reduces(group: Group, sizes: dict[str, int]) -> Times:
    """Return the seconds of an all_reduce in memory that the ranks share, and through the host's.

    The first is missing if the ranks cannot share the GPU's memory.
    """
    staging, x = group.split(0), group.empty(sizes["megabytes"] << 18)
    groups = {"staging": staging, "all_reduce": group}
    if getattr(group.communicator, "device_memory", None) is None:
        del groups["all_reduce"]
    staging.communicator.device_memory = None
    x[...] = 0
    works = {name: partial(partial, g.all_reduce, x, out=x) for name, g in groups.items()}
    return times_of(works, group.barrier, clock=partial(clock, group.device))


def shared_and_staged(ranks: list[Times]) -> dict[str, Answer]:
    """Return a round: an all_reduce in shared memory, and staged; or staged alone, and why."""
    seconds = slowest(ranks)
    staged = {"all_reduce": seconds["staging"]}
    if "all_reduce" not in seconds:
        return {"ours": staged, "staging": "staged: the ranks cannot share the GPU's memory"}
    return {"ours": seconds, "staging": staged}
