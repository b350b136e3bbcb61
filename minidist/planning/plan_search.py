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
from math import ceil, gcd, inf, isqrt
from typing import NamedTuple

from minidist.pipeline_parallel.schedules import MOST_PASSES, SCHEDULES
from minidist.planning.costs.memory import BYTES
from minidist.planning.costs.stages import block_parameters
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.estimate import Estimate, Step, block_of, fullest
from minidist.planning.plan import (
    ASYNCHRONOUS,
    RECOMPUTE,
    V_SHAPED,
    Machine,
    Plan,
    check_count,
)
from minidist.planning.why import in_short, why_slower, why_too_large

MESH, MICRO_BATCHES, OPTIONS, SCHEDULE, SIMULATED = range(5)
GROUPS = "interleaved", "interleaved_zb"  # of p micro-batches
LEFT_OUT = "layer_split", "zb_auto"  # always waits; is a search of its own, for measured times
MOST_CHUNKS = 8
MOST = 10**12  # a number whose divisors are looked for: a million are tried
LARGE = 4096  # ranks beyond which only IN_USE are tried, unless schedules are named
IN_USE = "1f1b", "interleaved"
PATTERNS = "v_half", "v_min"  # searched for a pattern: tried up to 8 ranks


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

    schedules  that are tried: by default all, and IN_USE on more than LARGE ranks
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
        self.too_large: dict[tuple, tuple[Plan, dict, bool]] = {}
        every = meshes(size, machine.ranks, batch, precision)
        self.open = [Open(self.least(mesh), next(self.numbers), MESH, mesh) for mesh in every]
        heapify(self.open)

    def best(self, wanted: int) -> Iterator[Estimate]:
        """Yield the best plans in order, simulated."""
        while self.open and wanted:
            first = heappop(self.open)
            if first.level == SIMULATED:
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

    def misfit(self, plans: Iterator[Plan]) -> tuple[Plan, dict] | None:
        """Return what holds least among all schedules of these plans; None if one fits."""
        plans, smallest = list(plans), None
        if min(least_states(self.size, plan) for plan in plans) > self.machine.memory:
            one = next(orders(self.size, plans[0], self.schedules))
            return one, fullest(self.size, one, self.batch)
        for one in chain.from_iterable(orders(self.size, plan, self.schedules) for plan in plans):
            least = sum(smallest[1].values()) if smallest else inf
            held = fullest(self.size, one, self.batch, max(least, self.machine.memory))
            if held and sum(held.values()) <= self.machine.memory:
                return None
            if held and sum(held.values()) < least:
                smallest = one, held
        return smallest

    def drop(self, plan: Plan, held: dict, leanest: bool = False) -> None:
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

    def bounded(self, plan: Plan, held: dict) -> Estimate:
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


def tried(ranks: int, named: Iterable[str] | None = None) -> list[str]:
    """Return the schedules that a search tries: those named, or the usual ones."""
    names = list((SCHEDULES if ranks <= LARGE else IN_USE) if named is None else named)
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise ValueError(f"no schedule {unknown[0]!r}; there are {', '.join(SCHEDULES)}")
    return [name for name in names if name not in (*ASYNCHRONOUS, *LEFT_OUT)]


def divisors(n: int) -> list[int]:
    """Return the divisors in order. ValueError above MOST: each number up to the root is tried."""
    if n > MOST:
        raise ValueError(f"{n} is too large to look for its divisors; use {MOST:,} or less")
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i < n]


def meshes(size: TransformerSize, ranks: int, batch: int, precision: str) -> Iterator[Plan]:
    """Yield every mesh of this number of ranks that divides heads, blocks, positions and batch."""
    all_pp = [pp for pp in divisors(ranks) if pp <= size.layers]
    of_heads, of_sequence = divisors(gcd(ranks, size.heads)), divisors(gcd(ranks, size.sequence))
    for tp, pp, cp in product(of_heads, all_pp, of_sequence):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or batch % dp:
            continue
        for ep in divisors(dp):
            if ep == 1 or (size.experts and size.experts % ep == 0):
                yield Plan(dp, pp, tp, cp, ep, precision=precision)


def micro_batches(batch: int, mesh: Plan) -> list[int]:
    """Return into how many micro-batches a rank's examples can be cut, for any of the schedules.

    More than MOST_PASSES allows cannot be simulated, and are left out.
    """
    most = max(1, MOST_PASSES // (mesh.pp * MOST_CHUNKS))
    return [m for m in divisors(batch // mesh.dp) if m <= most or mesh.pp == 1]


def options(size: TransformerSize, mesh: Plan) -> Iterator[Plan]:
    """Yield a mesh and its micro-batches with every option."""
    sequence = (False, True) if splits(size, mesh) else (False,)
    for recompute, zero, split in product(RECOMPUTE, zero_stages(mesh), sequence):
        yield replace(mesh, recompute=recompute, zero=zero, sequence=split)


def orders(size: TransformerSize, plan: Plan, among: Iterable[str] = ()) -> Iterator[Plan]:
    """Yield a plan with every schedule of these; by default with all that a small search tries.

    Loops have chunks of equal numbers of blocks. Blocks are cut equally where that is possible:
    "layers" would give the last but one stage a block more.
    """
    p, m = plan.pp, plan.micro_batches
    for schedule in sorted(
        among or tried(plan.ranks), key=lambda name: name != "1f1b"
    ):  # holds little: tried first
        most = SCHEDULES[schedule].most_chunks
        if p == 1 and schedule != "1f1b":
            continue  # without other stages all are the same
        few = (schedule == "dualpipe_v" and m < 2 * p) or (schedule in PATTERNS and p > 8)
        if few or (schedule in GROUPS and m % p):
            continue
        for v in [2] if schedule in V_SHAPED else range(2, 1 + MOST_CHUNKS) if not most else [1]:
            equal = size.layers % (p * v) == 0
            if p * v <= size.layers + 2 and (equal or most):
                cut = "blocks" if equal else "layers"
                yield replace(plan, schedule=schedule, chunks=v, cut=cut)


def splits(size: TransformerSize, mesh: Plan) -> bool:
    """Return whether tp can split the positions of this mesh: of a dense model, as in Hybrid."""
    dense = not size.experts
    return dense and mesh.tp > 1 and mesh.cp == 1 and size.sequence % mesh.tp == 0


def zero_stages(mesh: Plan) -> range:
    return range(1 if mesh.data == 1 else 4 if mesh.pp == 1 else 2)


def least_states(size: TransformerSize, plan: Plan) -> float:
    """Return the bytes of parameters, gradients and optimizer of a p-th of the blocks."""
    (w, g, o), block, data = BYTES[plan.precision, 16], block_parameters(size, plan), plan.data
    P, s = block.dense + block.experts, block.dense / data + block.experts * plan.ep / data
    each = (s if zero else P for zero in (plan.zero == 3, plan.zero >= 2, plan.zero >= 1))
    return size.layers / plan.pp * sum(n * held for n, held in zip((w, g, o), each, strict=True))
