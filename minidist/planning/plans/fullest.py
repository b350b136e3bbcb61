"""The rank of a planned pipeline that holds most, found without asking every rank."""

from functools import lru_cache
from math import inf

from minidist.planning.costs.memory import memory
from minidist.planning.costs.stages import cut_of
from minidist.planning.costs.stash import Entry, bounded, in_flight, largest, placement
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Plan

Held = dict[str, int]  # bytes by kind


def fullest(size: TransformerSize, plan: Plan, batch: int) -> Held:
    """Return the bytes of the pipeline rank that holds most."""
    most = fullest_within(size, plan, batch, inf)
    return {} if most is None else most


def fullest_within(size: TransformerSize, plan: Plan, batch: int, limit: float) -> Held | None:
    """Return the bytes of the rank that holds most; None as soon as one is above the limit."""
    m = bounded(plan.schedule, plan.pp, plan.micro_batches)
    shape = plan.schedule, plan.pp, m, plan.chunks
    most: Held = {}
    for r, points in fullest_points(size.layers, plan.cut, *shape):
        held = memory(size, plan, batch, r, points=points)
        if sum(held.values()) > limit:
            return None
        most = max(most, held, key=lambda own: sum(own.values()))
    return most


@lru_cache(10_000)
def fullest_points(
    layers: int, cut: str, schedule: str, p: int, m: int, chunks: int
) -> list[tuple[int, list[Entry]]]:
    """Return, of the ranks with the same stages, the first one and the entries of all of them.

    Ranks with the same stages hold the same for each micro-batch in flight.
    """
    flights, stages = in_flight(schedule, p, m, chunks), cut_of(layers, p * chunks, cut)
    alike: dict[tuple, list[int]] = {}
    for r, ks in enumerate(placement(schedule, p, chunks)):
        alike.setdefault(tuple(stages[k] for k in ks), []).append(r)
    return [(ranks[0], largest({e for r in ranks for e in flights[r]})) for ranks in alike.values()]
