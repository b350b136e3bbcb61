"""The rank of a planned pipeline that holds most, found without asking every rank."""

from functools import lru_cache
from math import inf

from minidist.planning.costs.memory import memory
from minidist.planning.costs.stages import cut_of
from minidist.planning.costs.stash import Entry, in_flight, placement
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Plan

Held = dict[str, int]  # bytes by kind


def fullest(size: TransformerSize, plan: Plan, batch: int) -> Held:
    """Return the bytes of the pipeline rank that holds most."""
    most = fullest_within(size, plan, batch, inf)
    return {} if most is None else most


def fullest_within(size: TransformerSize, plan: Plan, batch: int, limit: float) -> Held | None:
    """Return the bytes of the rank that holds most; None as soon as one is above the limit."""
    shape = plan.schedule, plan.pp, plan.micro_batches, plan.chunks
    most: Held = {}
    for r in fullest_ranks(size.layers, plan.cut, *shape):
        held = memory(size, plan, batch, r)
        if sum(held.values()) > limit:
            return None
        most = max(most, held, key=lambda own: sum(own.values()))
    return most


@lru_cache(10_000)
def fullest_ranks(
    layers: int, cut: str, schedule: str, p: int, m: int, chunks: int
) -> tuple[int, ...]:
    """Return the ranks among which the fullest is: no other has the same stages and holds more."""
    flights, stages = in_flight(schedule, p, m, chunks), cut_of(layers, p * chunks, cut)
    own = [[stages[k] for k in ks] for ks in placement(schedule, p, chunks)]
    found: list[int] = []
    for r in range(p):
        below = (own[s] == own[r] and no_more(flights[r], flights[s]) for s in found)
        if not any(below):
            found.append(r)
    return tuple(found)


def no_more(points: tuple[Entry, ...], others: tuple[Entry, ...]) -> bool:
    """Return whether every point has one among the others that is as large in all numbers."""
    return all(any(all(map(int.__le__, a, b)) for b in others) for a in points)
