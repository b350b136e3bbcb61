"""The best plan for a model on a machine: every mesh, schedule and option, the fastest that fits.

Best first (branch and bound; Hart, Nilsson, Raphael 1968 call the order A*). A heap holds what is
still open, by a time that it cannot beat. The first of it is opened:

    a mesh                 -> one for each number of micro-batches     no rank has more work
    and micro-batches      -> one for each schedule and option         that, with its collectives
    and all options        -> its simulation, if it fits               fill, work and drain
    a simulation           is the next best plan: nothing open can beat it

    dp=8 tp=8 pp=16: 9.1 s   ->   m=64: 9.1 s, m=32: 9.3 s   ->   1f1b: 10.0 s, gpipe: does not fit

So most meshes are never looked into, and most plans never simulated, and still no better one is
missed. What the bounds ignore is only time that a plan takes besides.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, count, product
from math import ceil, inf
from typing import NamedTuple

from minidist.planning.costs.stages import block_parameters
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_elements
from minidist.planning.plans.block import block_of
from minidist.planning.plans.estimate import Estimate, Step
from minidist.planning.plans.fullest import Held, fullest, fullest_within
from minidist.planning.plans.plan import RECOMPUTE, Machine, Plan, check_count
from minidist.planning.plans.space import meshes, micro_batches, options, orders, tried, zero_stages
from minidist.planning.plans.why import in_short, why_slower, why_too_large

MESH, MICRO_BATCHES, OPTIONS, SCHEDULE, SIMULATED = range(5)


class Open(NamedTuple):
    """What the heap holds: a plan of which `level` is fixed, and a time that it cannot beat."""

    bound: float
    number: int
    level: int
    plan: Plan
    estimate: Estimate | None = None


def search(
    size: TransformerSize,
    machine: Machine,
    batch: int,
    wanted: int = 1,
    precision: str = "mixed",
    schedules: Iterable[str] | None = None,
) -> list[Estimate]:
    """Return the `wanted` best plans, simulated, then the others; each says why it is worse.

    After the best come all that fit, by a time that they cannot beat, and all that do not fit. A
    mesh that was not looked into is one of them, in its fastest form. ValueError if nothing fits.

    schedules  that are tried: by default as in `tried`
    """
    check_count("batch", batch)
    check_count("wanted", wanted)
    found = Search(size, machine, batch, precision, schedules)
    best = list(found.best(wanted))
    if not best:
        raise ValueError(found.nothing_fits())
    others = [*best[1:], *found.others()]
    slower = [replace(e, why=why_slower(e, best[0])) for e in others if e.fits]
    return [best[0], *slower, *found.misfits()]


class Search:
    """The heap, and what has been found not to fit."""

    def __init__(
        self,
        size: TransformerSize,
        machine: Machine,
        batch: int,
        precision: str,
        schedules: Iterable[str] | None = None,
    ):
        self.schedules = tried(machine.ranks, schedules)
        if machine.ranks > 1 and "1f1b" not in self.schedules:
            raise ValueError("a mesh without a pipeline needs 1f1b; name it among the schedules")
        self.size, self.machine, self.batch, self.numbers = size, machine, batch, count()
        self.too_large: dict[tuple, tuple[Plan, Held, bool]] = {}
        every = meshes(size, machine.ranks, batch, precision)
        self.open = [Open(self.least(mesh), next(self.numbers), MESH, mesh) for mesh in every]
        heapify(self.open)

    def best(self, wanted: int) -> Iterator[Estimate]:
        """Yield the best plans in order, simulated."""
        while self.open and wanted:
            first = heappop(self.open)
            if first.estimate is not None:
                wanted -= 1
                yield first.estimate
            else:
                for inside in self.inside(first.level, first.plan):
                    heappush(self.open, inside)

    def inside(self, level: int, plan: Plan) -> Iterator[Open]:
        """Yield what is inside of an open one; keep what does not fit."""
        if level == SCHEDULE:
            held = fullest(self.size, plan, self.batch)
            if sum(held.values()) <= self.machine.memory:
                step = self.step(plan)
                simulated = step.estimate(step.makespan(), held)
                yield Open(simulated.seconds, next(self.numbers), SIMULATED, plan, simulated)
            else:
                self.drop(plan, held)
        elif misfit := self.misfit(self.leanest(level, plan)):
            self.drop(*misfit, leanest=level != OPTIONS)
        elif level == MESH:
            for m in micro_batches(self.batch, plan):
                one = replace(plan, micro_batches=m)
                yield Open(self.least(one), next(self.numbers), MICRO_BATCHES, one)
        elif level == MICRO_BATCHES:
            for one in options(self.size, plan):
                yield Open(self.least(one), next(self.numbers), OPTIONS, one)
        else:
            for one in orders(self.size, plan, self.schedules):
                yield Open(self.step(one).bound(), next(self.numbers), SCHEDULE, one)

    def least(self, plan: Plan) -> float:
        """Return a time that no schedule beats: the work of the rank that has most.

        It has ceil(L/p) blocks, or a p-th of everything. Fewer micro-batches never take longer, so
        that a mesh has the time of one micro-batch.
        """
        blocks, p, b = self.size.layers, plan.pp, self.batch // (plan.dp * plan.micro_batches)
        block = block_of(self.size, replace(plan, zero=0), self.machine, b)
        one, head = block.whole.total, block.head.total
        return plan.micro_batches * max(ceil(blocks / p) * one, (blocks * one + head) / p)

    def leanest(self, level: int, plan: Plan) -> Iterator[Plan]:
        """Yield plans of which one holds least of all that are inside of an open one."""
        if level == OPTIONS:
            yield plan
            return
        m = micro_batches(self.batch, plan)[-1] if level == MESH else plan.micro_batches
        *_, last = options(self.size, replace(plan, micro_batches=m))
        for recompute, zero in product(reversed(RECOMPUTE), reversed(zero_stages(plan))):
            yield replace(last, recompute=recompute, zero=zero)  # stage 3 has the most buffers

    def misfit(self, plans: Iterable[Plan]) -> tuple[Plan, Held] | None:
        """Return what holds least among all schedules of these plans; None if one fits."""
        plans = list(plans)
        smallest: tuple[Plan, Held] | None = None
        if min(least_states(self.size, plan) for plan in plans) > self.machine.memory:
            one = next(orders(self.size, plans[0], self.schedules))
            return one, fullest(self.size, one, self.batch)
        for one in chain.from_iterable(orders(self.size, plan, self.schedules) for plan in plans):
            least = sum(smallest[1].values()) if smallest else inf
            held = fullest_within(self.size, one, self.batch, max(least, self.machine.memory))
            if held and sum(held.values()) <= self.machine.memory:
                return None
            if held and sum(held.values()) < least:
                smallest = one, held
        return smallest

    def drop(self, plan: Plan, held: Held, leanest: bool = False) -> None:
        """Keep what does not fit: of each mesh and schedule, what holds least."""
        known = self.too_large.get(key := key_of(plan))
        if known is None or sum(held.values()) < sum(known[1].values()):
            self.too_large[key] = plan, held, leanest

    def misfits(self) -> list[Estimate]:
        """Return what does not fit, sorted by what it holds."""
        result = []
        for plan, held, leanest in self.too_large.values():
            one = self.bounded(plan, held)
            result.append(replace(one, why=why_too_large(one, leanest)))
        return sorted(result, key=lambda e: e.held)

    def step(self, plan: Plan) -> Step:
        return Step(self.size, plan, self.machine, self.batch)

    def bounded(self, plan: Plan, held: Held) -> Estimate:
        """Return an estimate whose time is only a bound."""
        step = self.step(plan)
        return step.estimate(step.bound(), held, simulated=False)

    def others(self) -> Iterator[Estimate]:
        """Yield, of each mesh and schedule, the best of what is still open, sorted by its bound."""
        seen = set()
        for one in sorted(self.open):
            plan, key = one.plan, key_of(one.plan)
            if one.level != SIMULATED and key in seen:
                continue
            seen.add(key)
            estimate = one.estimate
            if estimate is None:
                held = fullest(self.size, plan, self.batch)
                estimate = replace(self.bounded(plan, held), seconds=one.bound)
            if estimate.fits:
                yield estimate
            else:
                self.drop(plan, estimate.memory)

    def nothing_fits(self) -> str:
        if not self.too_large:
            ranks = self.machine.ranks
            return f"no mesh of {ranks} ranks divides this model and {self.batch} examples"
        least = self.misfits()[0]
        return f"nothing fits; the leanest plan, {in_short(least.plan)}, {least.why}"


def key_of(plan: Plan) -> tuple:
    """Return the mesh and the schedule."""
    return plan.dp, plan.pp, plan.tp, plan.cp, plan.ep, plan.schedule, plan.chunks


def least_states(size: TransformerSize, plan: Plan) -> float:
    """Return the bytes of parameters, gradients and optimizer of a p-th of the blocks."""
    widths, block, data = BYTES[plan.precision, 16], block_parameters(size, plan), plan.data
    P, s = block.dense + block.experts, block.dense / data + block.experts * plan.ep / data
    held = zero_elements(plan.zero, float(P), s, 0.0)
    return size.layers / plan.pp * sum(n * width for n, width in zip(held, widths, strict=True))
