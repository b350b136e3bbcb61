"""One block of one micro-batch: the seconds of its work, and of what travels over tp, ep and cp."""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, log2, prod
from typing import NamedTuple

from minidist.planning.costs import traffic
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Machine, Plan
from minidist.planning.plans.roofline import Times, attention_seconds, block_times, head_times

INNER_TO_OUTER = "tp", "cp", "pp", "dp"


def rate_of(axis: str, plan: Plan, machine: Machine) -> float:
    """Return the bytes per second at which a rank sends along an axis.

    A group of n ranks that are k apart is within a run of k n ranks; k is the product of the axes
    inside of this one. It is in one node if such runs divide the node: then it has `link`, else
    `network`. The ranks of ep are neighbours on dp.
    """
    order = INNER_TO_OUTER
    inner = prod(getattr(plan, a) for a in order[: order.index("dp" if axis == "ep" else axis)])
    inside = machine.per_node % (inner * getattr(plan, axis)) == 0
    return machine.link if inside else machine.network


def travel(
    axis: str, plan: Plan, machine: Machine, nbytes: Fraction | float, operations: int
) -> float:
    """Return the seconds that these bytes and operations take along an axis.

    That is bytes / rate, and latency for each round of each operation: ceil(log2 n) rounds of a
    collective of n ranks, 1 of a message on pp or cp. Gradients are summed over the dp x cp ranks
    together, at the slower of both axes' rates.
    """
    ranks, rate = getattr(plan, axis), rate_of(axis, plan, machine)
    if axis == "dp" and plan.cp > 1:
        ranks, rate = plan.data, min(rate, rate_of("cp", plan, machine))
    rounds = 1 if axis in ("pp", "cp") else ceil(log2(ranks))
    return float(nbytes) / rate + operations * rounds * machine.latency


def hidden(work: float, sent: float, pieces: int) -> float:
    """Return the time of work in equal pieces whose results, or inputs, travel beside it.

    The first piece, or the last message, has nothing to hide behind.
    """
    return max(work + sent / pieces, sent + work / pieces) if sent else work


class Block(NamedTuple):
    """One block of one micro-batch, and the head's products.

    spent  seconds of the block's products, of what is no product, and of waiting for an axis
    whole  all of these together
    links  by axis, the seconds that its collectives over tp, ep and cp take
    """

    spent: dict[str, Times]
    whole: Times
    head: Times
    links: dict[str, float]


@lru_cache(100_000)
def block_of(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Block:
    """Return the times of b examples; what embedding and head send is spread over the blocks."""
    rows, runs = b * ceil(size.sequence / plan.cp), plan.micro_batches * size.layers
    alone = replace(plan, pp=1, schedule="1f1b", chunks=1, cut="layers")
    ways = {"tp": traffic.over_tensor, "ep": traffic.over_experts, "cp": traffic.over_context}
    links = {
        axis: travel(axis, plan, machine, nbytes, number) / runs
        for axis, (nbytes, number) in ((a, way(size, alone, 0, rows)) for a, way in ways.items())
    }
    spent = block_times(size, plan, machine, b)
    spent |= waiting(plan, attention_seconds(size, plan, machine, b), **links)
    return Block(spent, sum(spent.values(), Times()), head_times(size, plan, machine, b), links)


def waiting(plan: Plan, attention: float, tp: float, ep: float, cp: float) -> dict[str, Times]:
    """Return what a block's collectives add to its work; attention hides the ring of cp.

    Of tp, backward has as much as forward; half more if a split sequence is gathered again. Of cp,
    it has twice as much: keys and values again, and their gradients.
    """
    forwards, attends = traffic.forwards(plan), 2 if plan.recompute == "none" else 3
    one = tp / ((1.5 if plan.sequence else 1) + forwards)
    two, ring = ep / (1 + forwards), cp / (2 + forwards)
    hides = attention * (1 - 1 / plan.cp)
    return {
        "tensor": Times(one, tp - one),
        "experts": Times(two, ep - two),
        "context": Times(max(0, ring - hides), max(0, cp - ring - attends * hides)),
    }
