"""Judge a schedule by its paper: a simulation finds how long ranks idle, and what they hold.

Of p ranks, m micro-batches, v chunks, with the times TF, TI, TW of a stage.
"""

from fractions import Fraction
from functools import partial
from typing import NamedTuple

from minidist.course.probes import pipelines as probes
from minidist.course.question import Answer, Question, Random
from minidist.course.questions.arrays import ask, by_rank
from minidist.errors import plural
from minidist.pipeline_parallel import validate
from minidist.pipeline_parallel.placement import Programs, looped
from minidist.planning import simulate


class Times(NamedTuple):
    """How long F, I and W of one stage take."""

    forward: Fraction
    backward_input: Fraction
    backward_weight: Fraction


def times(rng: Random) -> Times:
    """Draw times of which W is the shortest: where all formulas hold."""
    f, i, w = (Fraction(int(n)) for n in rng.integers(3, 9, 3))
    return Times(f, i, min(f, i, w) - Fraction(int(rng.integers(0, 3))))


class Promise(NamedTuple):
    """What a schedule's paper says of it.

    idle     units of time for which a rank idles at most; its formula
    stash    stages' worth of activations that each rank holds at most; its formula
    span     idle time is counted from each rank's own start
    exactly  the stash is not smaller either
    """

    idle: Fraction | float
    idle_formula: str
    stash: list
    stash_formula: str
    span: bool = False
    exactly: bool = False


def scheduled(name: str, p: int, m: int, t: Times, promise: Promise, chunks: int = 1) -> Question:
    """Ask for a schedule that keeps its paper's promise."""
    about = f"{plural(p, 'rank')}, {plural(m, 'micro-batch')}"
    about += f", {chunks} chunks" if chunks > 1 else ""
    judge = partial(keeps, promise=promise, placement=looped(p, chunks), m=m, t=t)
    return ask(about, probes.schedule, judge, name=name, p=p, m=m, chunks=chunks)


def keeps(
    answer: Answer, want: Answer, promise: Promise, placement: list, m: int, t: Times
) -> str | None:
    """Judge a schedule by a simulation."""
    made = probes.read(by_rank(answer, "the program"), placement)
    if message := fault(made, m):
        return message
    found = simulate(made, *t)
    total = found.span if promise.span else found.makespan
    if (idle := total - m * sum(t)) > promise.idle:
        return (
            f"a rank idles {idle} units of {total}, not {promise.idle} = {promise.idle_formula} "
            f"(TF, TI, TW = {', '.join(map(str, t))})"
        )
    for r, (got, most) in enumerate(zip(found.peak_stash, promise.stash, strict=True)):
        if got > most or (promise.exactly and got != most):
            unit = "micro-batches" if len(placement[0]) == 1 else "stages' worth"
            return f"rank {r} holds {got} {unit} at its peak, not {most} = {promise.stash_formula}"
    return None


def fault(made: Programs, m: int) -> str | None:
    """Return what `validate` says, without its picture."""
    try:
        validate(made, len(made), m)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None
