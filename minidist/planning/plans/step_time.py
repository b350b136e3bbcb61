"""How long a pipeline's step takes: its program on the simulator, for any number of micro-batches.

A program's makespan is the longest path through it: the maximum of sums of durations. Once the
pipeline is full, c more micro-batches add the same to it each time; c is p, so that schedules in
groups of p are full groups. So a long batch needs not be simulated whole:

    makespan(m) = makespan(m0) + (m - m0) / c (makespan(m0 + c) - makespan(m0))

with m0 of a few times p, if the second c micro-batches add what the first did. Where they do not,
or where it would save nothing, the whole batch is simulated.
"""

from functools import lru_cache
from typing import NamedTuple

from minidist.pipeline_parallel import add_reductions, programs
from minidist.pipeline_parallel.actions import Programs
from minidist.planning.simulator import simulate

FULL = 4  # times p: micro-batches after which a pipeline is taken to be full
WHOLE = 3 * FULL + 3  # times p: what the three short simulations have together


class TimedPipeline(NamedTuple):
    """A schedule, and the durations of its actions, in any unit; tuples: one per virtual stage.

    delay   of a message from one stage to the next
    reduce  of the sum of a stage's gradients over its copies, beside what follows
    """

    schedule: str
    p: int
    chunks: int
    forward: tuple
    inputs: tuple
    weights: tuple
    delay: float = 0
    reduce: tuple | int = 0

    def makespan(self, m: int):
        """Return the time of a step of m micro-batches; exact with ints and Fractions."""
        p = self.p
        if m <= WHOLE * p:
            return simulated(self, m)
        first = FULL * p + (m - FULL * p) % p
        one, two, three = (simulated(self, first + i * p) for i in range(3))
        if not _same(two - one, three - two):
            return simulated(self, m)
        return one + (m - first) // p * (two - one)


@lru_cache(100_000)
def simulated(pipeline: TimedPipeline, m: int):
    """Return the makespan of all m micro-batches, action by action."""
    order = ordered(pipeline.schedule, pipeline.p, m, pipeline.chunks)
    return simulate(
        order,
        list(pipeline.forward),
        list(pipeline.inputs),
        list(pipeline.weights),
        latency=pipeline.delay,
        reduce=list(pipeline.reduce) if isinstance(pipeline.reduce, tuple) else pipeline.reduce,
    ).makespan


@lru_cache(16)
def ordered(schedule: str, p: int, m: int, chunks: int) -> Programs:
    """Return the programs with their sums."""
    return add_reductions(programs(schedule, p, m, chunks))


def _same(a, b) -> bool:
    """Return whether two sums are equal, up to the rounding of floats."""
    return a == b or (isinstance(a, float) and abs(a - b) <= 1e-9 * max(abs(a), abs(b)))
