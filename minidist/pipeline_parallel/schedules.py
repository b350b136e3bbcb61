"""Every schedule by name, as programs: lists of actions, one per rank. And your own, checked."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from numbers import Integral
from typing import NamedTuple

from minidist.errors import WrongInput, check_name, check_options, options_of
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Programs,
    looped,
    micro_batches_of,
    pairs_of,
    placement_of,
    updates,
)
from minidist.pipeline_parallel.controllable_memory import v_half, v_min
from minidist.pipeline_parallel.dualpipe_v import dualpipe_v
from minidist.pipeline_parallel.gpipe import gpipe
from minidist.pipeline_parallel.interleaved import interleaved
from minidist.pipeline_parallel.interleaved_zb import interleaved_zb
from minidist.pipeline_parallel.layer_split import layer_split
from minidist.pipeline_parallel.looped_bfs import looped_bfs
from minidist.pipeline_parallel.one_f_one_b import one_f_one_b
from minidist.pipeline_parallel.pipedream import pipedream_2bw_programs, pipedream_programs
from minidist.pipeline_parallel.validation import validate
from minidist.pipeline_parallel.zb_auto import zb_auto
from minidist.pipeline_parallel.zero_bubble import zb_h1, zb_h2, zb_v

MOST_PASSES = 1_000_000  # passes forward, over all ranks: some hundred MB of actions
UPDATES_ITSELF = "updates the weights itself, stage by stage; use PipeDream"


def programs(
    schedule: str, p: int, m: int, chunks: int = 1, weights_last: bool = False, **options
) -> Programs:
    """Return the compute actions of p ranks for m micro-batches (asynchronous: m in all).

    chunks        stages per rank: any number for "interleaved", "interleaved_zb" and "looped_bfs";
                  always 2 for the V-shaped "zb_v", "dualpipe_v", "v_half" and "v_min"
    weights_last  defer every weight half to the end, where all micro-batches together take one
                  product per weight. dX is sent before dW is computed, as in zb_h1. This costs the
                  memory of m micro-batches
    options       "pipedream" takes replicas, "pipedream_2bw" takes update_every, "zb_auto" takes
                  forward, backward_input, backward_weight, latency and memory

    There are at most MOST_PASSES passes forward, p times m times chunks.
    """
    check_name("schedule", schedule, SCHEDULES)
    build, most, asynchronous, _ = SCHEDULES[schedule]
    check_numbers(schedule, p, m, chunks, most)
    if options:
        check_options(build, options, schedule, also=["weights_last"])
    if weights_last and asynchronous:
        raise WrongInput(
            f"{schedule} updates the weights during its program, so no gradient may wait for the "
            "end; use it without weights_last"
        )
    result = build(p, m, **options) if most else build(p, m, chunks, **options)
    return put_weights_last(result) if weights_last else result


def check_numbers(schedule: str, p: int, m: int, chunks: int, most: int | None) -> None:
    """Raise ValueError for numbers that no schedule, or not this one, can have."""
    for number, what in ((p, "ranks"), (m, "micro-batches"), (chunks, "chunks")):
        if not isinstance(number, Integral) or number < 1:
            raise WrongInput(f"a pipeline has one or more {what}, not {number!r}")
    if most is not None and chunks > most:
        count = "1 chunk" if most == 1 else f"{most} chunks"
        raise WrongInput(
            f"{schedule} has at most {count} per rank, not {chunks}; interleaved takes any number"
        )
    if (passes := prod(map(int, (p, m, chunks)))) > MOST_PASSES:
        raise WrongInput(
            f"{p} ranks, {m} micro-batches and {chunks} chunks per rank make {passes} forward "
            f"passes, more than {MOST_PASSES}; use fewer micro-batches"
        )


def order_of(
    schedule: str | list[list[Action]],
    p: int,
    micro_batches: int | None = None,
    chunks: int | None = None,
    **options,
) -> Programs:
    """Return the programs of a `Pipeline` of p ranks: a schedule by its name, or your own ones.

    micro_batches, chunks  of a name, by default 4 and 1; own programs have them, so that a number
                           given here is only compared

    ValueError, for own programs with the grid and a mark, where they cannot be run.
    """
    if not isinstance(schedule, str):
        return own_order(schedule, p, micro_batches, chunks, options)
    m, v = 4 if micro_batches is None else micro_batches, 1 if chunks is None else chunks
    if options and schedule in SCHEDULES:  # here these numbers have names, which may be misspelt
        names = ["weights_last", "micro_batches", "chunks"]
        check_options(SCHEDULES[schedule].build, options, schedule, names)
    result = programs(schedule, p, m, v, **options)
    if SCHEDULES[schedule].asynchronous:
        raise WrongInput(f"{schedule} {UPDATES_ITSELF}")
    return result


def own_order(
    schedule: list[list[Action]], p: int, m: int | None, chunks: int | None, options: dict
) -> Programs:
    """Return own programs; ValueError if p ranks cannot run them, or their numbers are others."""
    if not isinstance(schedule, list):
        raise WrongInput(f"a schedule is a name or a list of programs, not {schedule!r}")
    if options:
        raise WrongInput(f"programs have no option {next(iter(options))!r}; a name has")
    result = Programs(schedule, placement_of(schedule), pairs_of(schedule))
    count, chunks_of = micro_batches_of(result), [len(own) for own in result.placement]
    if m not in (None, count):
        raise WrongInput(
            f"these programs are of {count} micro-batches, not {m}; leave the number out"
        )
    validate(result, p, count)
    if chunks is not None and set(chunks_of) != {chunks}:
        raise WrongInput(f"these programs have {chunks_of} chunks, not {chunks}; leave chunks out")
    stage, holders = Counter(k for own in result.placement for k in own).most_common(1)[0]
    if holders > 1:
        raise WrongInput(
            f"{holders} ranks hold stage {stage}; replicas are PipeDream's, or the dp of Hybrid"
        )
    if updates(result):
        raise WrongInput(f"a program {UPDATES_ITSELF}")
    return result


def takes(schedule: str) -> list[str]:
    """Return the names of the options that this schedule has of its own."""
    return options_of(SCHEDULES[schedule].build)[0]


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
    pairs = [(r, f, BackwardInput(b.micro_batch, b.chunk)) for r, f, b in programs.pairs]
    return Programs(result, programs.placement, pairs)


class Schedule(NamedTuple):
    """How programs are built: (p, m, **options) -> Programs, with one chunk per rank, or with two.

    most_chunks   None: any number of chunks, and the builder takes (p, m, chunks)
    asynchronous  whether the programs update the weights
    of_rank       the actions of one rank, where each is made alone: (rank, p, m) -> actions, or
                  (rank, p, m, chunks)
    """

    build: Callable[..., Programs]
    most_chunks: int | None = 1
    asynchronous: bool = False
    of_rank: Callable[..., Iterator[Action]] | None = None


def on_every_rank(
    program: Callable[..., Iterator[Action]], most_chunks: int | None = 1
) -> Schedule:
    """Return a schedule of program(rank, p, m), or of program(rank, p, m, chunks).

    Virtual stage k is on rank k mod p.
    """

    def build(p: int, m: int, *chunks: int) -> Programs:
        return Programs([program(r, p, m, *chunks) for r in range(p)], looped(p, *chunks))

    return Schedule(build, most_chunks, of_rank=program)


def actions_of_rank(schedule: str, p: int, m: int, chunks: int, r: int) -> list[Action]:
    """Return the actions of one rank; without those of the others, where that is possible."""
    _, most, _, of_rank = SCHEDULES[schedule]
    if of_rank is None:
        return built(schedule, p, m, chunks)[r]
    return list(of_rank(r, p, m) if most else of_rank(r, p, m, chunks))


SCHEDULES = {
    "layer_split": on_every_rank(layer_split),
    "gpipe": on_every_rank(gpipe),
    "1f1b": on_every_rank(one_f_one_b),
    "interleaved": on_every_rank(interleaved, None),
    "looped_bfs": on_every_rank(looped_bfs, None),
    "zb_h1": on_every_rank(zb_h1),
    "zb_h2": on_every_rank(zb_h2),
    "zb_auto": Schedule(zb_auto),
    "interleaved_zb": on_every_rank(interleaved_zb, None),
    "zb_v": Schedule(zb_v, 2),
    "dualpipe_v": Schedule(dualpipe_v, 2),
    "v_half": Schedule(v_half, 2),
    "v_min": Schedule(v_min, 2),
    "pipedream": Schedule(pipedream_programs, asynchronous=True),
    "pipedream_2bw": Schedule(pipedream_2bw_programs, asynchronous=True),
}

built = lru_cache(4)(programs)
