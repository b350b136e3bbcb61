"""The rank of a planned pipeline that holds most, found without asking every rank."""

from functools import lru_cache
from math import inf

from minidist.planning.costs.memory import memory
from minidist.planning.costs.stages import cut_of
from minidist.planning.costs.stash import Entry, bounded, in_flight_on, largest, placement
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
    for ranks in alike(size.layers, plan.cut, plan.schedule, plan.pp, plan.chunks):
        held = memory(size, plan, batch, ranks[0], points=most_in_flight(ranks, *shape))
        if sum(held.values()) > limit:
            return None
        most = max(most, held, key=lambda own: sum(own.values()))
    return most


@lru_cache(1024)
def alike(layers: int, cut: str, schedule: str, p: int, chunks: int) -> list[tuple[int, ...]]:
    """Return the ranks, those with the same stages together.

    They hold the same for each micro-batch in flight.
    """
    stages = cut_of(layers, p * chunks, cut)
    found: dict[tuple, list[int]] = {}
    for r, own in enumerate(placement(schedule, p, chunks)):
        found.setdefault(tuple(stages[k] for k in own), []).append(r)
    return [tuple(ranks) for ranks in found.values()]


def most_in_flight(ranks: tuple[int, ...], schedule: str, p: int, m: int, v: int) -> list[Entry]:
    """Return the entries of all these ranks that no other one exceeds."""
    return _most_in_flight(ranks, schedule, p, bounded(schedule, p, m), v)


@lru_cache(10_000)
def _most_in_flight(ranks: tuple[int, ...], *shape) -> list[Entry]:
    return largest({entry for r in ranks for entry in in_flight_on(r, *shape)})
