"""Every schedule by name, as programs: lists of actions, one per rank."""

from collections.abc import Callable
from functools import wraps
from math import prod
from numbers import Integral
from typing import NamedTuple

from minidist.errors import check_options
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Programs,
    Update,
    looped,
)
from minidist.pipeline_parallel.gpipe import gpipe
from minidist.pipeline_parallel.interleaved import interleaved
from minidist.pipeline_parallel.layer_split import layer_split
from minidist.pipeline_parallel.one_f_one_b import one_f_one_b
from minidist.pipeline_parallel.pipedream import pipedream_2bw_programs, pipedream_programs
from minidist.pipeline_parallel.zero_bubble import v_shaped, zb_h1, zb_h2, zb_v

MOST_PASSES = 1_000_000  # passes forward, over all ranks: some hundred MB of actions


def programs(
    schedule: str, p: int, m: int, chunks: int = 1, weights_last: bool = False, **options
) -> Programs:
    """Return the compute actions of p ranks for m micro-batches (asynchronous: m in all).

    chunks        stages per rank: any number for "interleaved", always 2 for "zb_v"
    weights_last  defer every weight half to the end, where all micro-batches together take one
                  product per weight. dX is sent before dW is computed, as in zb_h1. This costs the
                  memory of m micro-batches
    options       "pipedream" takes replicas, "pipedream_2bw" takes update_every

    There are at most MOST_PASSES passes forward, p times m times chunks.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    for number, what in ((p, "ranks"), (m, "micro-batches"), (chunks, "chunks")):
        if not isinstance(number, Integral) or number < 1:
            raise ValueError(f"a pipeline has one or more {what}, not {number!r}")
    build, most = SCHEDULES[schedule]
    if most is not None and chunks > most:
        raise ValueError(
            f"{schedule} has at most {most} chunk{'s' * (most > 1)} per rank, not {chunks}; "
            "interleaved takes any number"
        )
    if (passes := prod(map(int, (p, m, chunks)))) > MOST_PASSES:
        raise ValueError(
            f"{p} ranks, {m} micro-batches and {chunks} chunks per rank make {passes} forward "
            f"passes, more than {MOST_PASSES}; use fewer micro-batches"
        )
    check_options(build, options, schedule, also=["weights_last"])
    result = build(p, m, chunks, **options)
    if weights_last and updates(result):
        raise ValueError(
            f"{schedule} updates the weights during its program, so no gradient may wait for the "
            "end; use it without weights_last"
        )
    return put_weights_last(result) if weights_last else result


def updates(programs: Programs) -> bool:
    """Return whether these programs update the weights themselves, that is, are asynchronous."""
    return any(isinstance(a, Update) for program in programs for a in program)


def put_weights_last(programs: Programs) -> Programs:
    """Split every B into I and W, and move all W to the end, chunk by chunk."""
    result = []
    for program in programs:
        first = [
            BackwardInput(a.micro_batch, a.chunk) if isinstance(a, Backward) else a
            for a in program
            if not isinstance(a, BackwardWeight)
        ]
        done = [(a.chunk, a.micro_batch) for a in first if isinstance(a, BackwardInput)]
        result.append([*first, *(BackwardWeight(i, chunk) for chunk, i in sorted(done))])
    return Programs(result, programs.placement)


def _one_chunk(program: Callable) -> Callable:
    """Place stage r on rank r, for a program(rank, p, m, **options)."""

    @wraps(program)  # so that its options can be asked for
    def every_rank(p, m, chunks, **options):
        return Programs([program(r, p, m, **options) for r in range(p)], looped(p, 1))

    return every_rank


def _interleaved(p, m, chunks):
    return Programs([interleaved(r, p, m, chunks) for r in range(p)], looped(p, chunks))


def _zb_v(p, m, chunks):
    return Programs([zb_v(r, p, m) for r in range(p)], v_shaped(p))


def _any_chunks(build: Callable) -> Callable:
    return wraps(build)(lambda p, m, chunks, **options: build(p, m, **options))


class Schedule(NamedTuple):
    """How programs are built, (p, m, chunks, **options) -> Programs; None: any number of chunks."""

    build: Callable[..., Programs]
    most_chunks: int | None = 1


SCHEDULES = {
    "layer_split": Schedule(_one_chunk(layer_split)),
    "gpipe": Schedule(_one_chunk(gpipe)),
    "1f1b": Schedule(_one_chunk(one_f_one_b)),
    "interleaved": Schedule(_interleaved, None),
    "zb_h1": Schedule(_one_chunk(zb_h1)),
    "zb_h2": Schedule(_one_chunk(zb_h2)),
    "zb_v": Schedule(_zb_v, 2),
    "pipedream": Schedule(_any_chunks(pipedream_programs)),
    "pipedream_2bw": Schedule(_any_chunks(pipedream_2bw_programs)),
}
