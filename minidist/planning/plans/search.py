"""The best plan for a model on a machine: every mesh, schedule and option, the fastest that fits.

Best first (branch and bound; Hart, Nilsson, Raphael 1968 call the order A*). A heap holds what is
still open, by a time that it cannot beat. The first of it is opened:

    a mesh                 -> one for each number of micro-batches     no rank has more work
    and micro-batches      -> one for each schedule and option         that, with its collectives
    and all options        -> its simulation, if it fits               fill, work and drain
    a simulation           is the next best plan: nothing open can beat it

    dp=8 tp=8 pp=16: 9.1 s   ->   m=64: 9.1 s, m=32: 9.3 s   ->   1f1b: 10.0 s, gpipe: does not fit

So most meshes are never looked into, and most plans never simulated, and still no better one is
missed: an open one's bound is the least of all options inside of it, and what a bound ignores is
only time that a plan takes besides.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count, islice, product
from math import ceil, gcd, inf, isqrt
from typing import NamedTuple

from minidist.errors import WrongInput, check_name
from minidist.pipeline_parallel.schedules import MOST_PASSES, SCHEDULES
from minidist.planning.costs.memory import micro_batch, minidist
from minidist.planning.costs.stages import block_parameters
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_elements
from minidist.planning.plans.block import block_of
from minidist.planning.plans.estimate import Estimate, Held, Step, fullest
from minidist.planning.plans.plan import (
    ASYNCHRONOUS,
    LEFT_OUT,
    RECOMPUTE,
    V_SHAPED,
    Machine,
    Plan,
    check_count,
)
from minidist.planning.plans.why import in_short, why_slower, why_too_large

GROUPS = "interleaved", "interleaved_zb"  # of p micro-batches
PATTERNS = "v_half", "v_min"  # searched for a pattern: tried up to 8 ranks
LARGE = 4096  # ranks beyond which only IN_USE are tried, unless schedules are named
IN_USE = "1f1b", "interleaved"
MOST_CHUNKS = 8
MOST = 10**12  # a number whose divisors are looked for: a million are tried


def tried(ranks: int, named: Iterable[str] | None = None) -> list[str]:
    """Return the schedules that a search tries: those named, or the usual ones."""
    names = list((SCHEDULES if ranks <= LARGE else IN_USE) if named is None else named)
    for name in names:
        check_name("schedule", name, SCHEDULES)
    return [name for name in names if name not in (*ASYNCHRONOUS, *LEFT_OUT)]


def divisors(n: int) -> list[int]:
    """Return the divisors in order. ValueError above MOST: each number up to the root is tried."""
    if n > MOST:
        raise WrongInput(f"{n} is too large to look for its divisors; use {MOST:,} or less")
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i < n]


def meshes(size: TransformerSize, ranks: int, batch: int) -> Iterator[Plan]:
    """Yield every mesh of this number of ranks that divides heads, blocks, positions and batch."""
    all_pp = [pp for pp in divisors(ranks) if pp <= size.layers]
    of_heads, of_sequence = divisors(gcd(ranks, size.heads)), divisors(gcd(ranks, size.sequence))
    for tp, pp, cp in product(of_heads, all_pp, of_sequence):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or batch % dp:
            continue
        for ep in divisors(dp):
            if ep == 1 or (size.experts and size.experts % ep == 0):
                yield Plan(dp, pp, tp, cp, ep)


def micro_batches(batch: int, mesh: Plan) -> list[int]:
    """Return into how many micro-batches a rank's examples can be cut, for any of the schedules.

    More than MOST_PASSES allows cannot be simulated, and are left out.
    """
    most = max(1, MOST_PASSES // (mesh.pp * MOST_CHUNKS))
    return [m for m in divisors(batch // mesh.dp) if m <= most or mesh.pp == 1]


def options(size: TransformerSize, mesh: Plan, per_node: int | None = None) -> Iterator[Plan]:
    """Yield a mesh and its micro-batches with every option; the leanest last.

    per_node  ranks of a node, each of which may have a copy of what ZeRO shares; None: none has
    """
    sequence = (False, True) if splits(size, mesh) else (False,)
    inside = None if per_node is None else shards_of_node(mesh, per_node)
    for recompute, zero, split in product(RECOMPUTE, zero_stages(mesh), sequence):
        for shards in (inside, None) if zero and inside else (None,):
            yield replace(mesh, recompute=recompute, zero=zero, sequence=split, shards=shards)


def shards_of_node(mesh: Plan, per_node: int) -> int | None:
    """Return how many ranks of dp x cp are in one node, if a few are, and others elsewhere."""
    inner = mesh.tp * mesh.cp * mesh.pp
    if mesh.ep > 1 or per_node % inner:
        return None
    k = gcd(mesh.dp, per_node // inner)
    return k * mesh.cp if k < mesh.dp and k * mesh.cp > 1 else None


def orders(size: TransformerSize, plan: Plan, among: Iterable[str] = ()) -> Iterator[Plan]:
    """Yield a plan with every schedule of these; by default with all that a small search tries.

    Loops have chunks of equal numbers of blocks. Blocks are cut equally where that is possible:
    "layers" would give the last but one stage a block more.
    """
    p, m = plan.pp, plan.micro_batches
    names = sorted(among or tried(plan.ranks), key=lambda name: name != "1f1b")  # it holds little
    for schedule in names:
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


MESH, MICRO_BATCHES, OPTIONS, SCHEDULE, SIMULATED = range(5)


class Open(NamedTuple):
    """A node of the heap: a plan fixed up to level, and a time that no plan below it beats."""

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
    schedules: Iterable[str] | None = None,
    others: int = 0,
) -> list[Estimate]:
    """Return the `wanted` best plans, then the best of `others` other meshes, all simulated.

    Each says why it is worse. Last come those that do not fit. ValueError if nothing fits.

    schedules  that are tried: by default as in `tried`
    """
    check_count("batch", batch)
    check_count("wanted", wanted)
    planner = Search(size, machine, batch, schedules)
    best = list(planner.best(wanted))
    if not best:
        raise WrongInput(planner.nothing_fits())
    slower = [*best[1:], *planner.others(others, {mesh_of(e.plan) for e in best})]
    why = (replace(e, why=why_slower(e, best[0])) for e in slower)
    return [best[0], *why, *planner.misfits()]


class Search:
    """The heap, and what has been found not to fit."""

    def __init__(
        self,
        size: TransformerSize,
        machine: Machine,
        batch: int,
        schedules: Iterable[str] | None = None,
    ):
        self.schedules = tried(machine.ranks, schedules)
        if machine.ranks > 1 and "1f1b" not in self.schedules:
            raise WrongInput("a mesh without a pipeline needs 1f1b; name it among the schedules")
        self.size, self.machine, self.batch, self.numbers = size, machine, batch, count()
        self.too_large: dict[tuple, tuple[Plan, Held, bool]] = {}
        every = meshes(size, machine.ranks, batch)
        self.open = [Open(self.least(mesh, MESH), next(self.numbers), MESH, mesh) for mesh in every]
        heapify(self.open)

    def best(self, wanted: int, among: list[Open] | None = None) -> Iterator[Estimate]:
        """Yield up to `wanted` of the best plans that fit, in order, simulated.

        The first of the heap is removed: a simulated one is yielded, and what is inside of any
        other is pushed.

        among  the heap: by default of all that is open
        """
        heap = self.open if among is None else among
        while heap and wanted:
            first = heappop(heap)
            if first.estimate is not None:
                wanted -= 1
                yield first.estimate
            else:
                for inside in self.inside(first.level, first.plan):
                    heappush(heap, inside)

    def inside(self, level: int, plan: Plan) -> Iterator[Open]:
        """Yield what is inside of an open one, each with its bound; keep what does not fit.

        Inside of a mesh are its `micro_batches`; inside of these, their `options`, of which some
        need the ranks of a node; inside of an option, its `orders`, each with the bound of its
        `step`; inside of one of these is its simulation, if its fullest rank fits: with its
        estimate and, as a bound, its seconds. If even the leanest plans do not fit, the one that
        holds least is dropped, and nothing is inside.
        """
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
                bound = self.least(one, MICRO_BATCHES)
                yield Open(bound, next(self.numbers), MICRO_BATCHES, one)
        elif level == MICRO_BATCHES:
            for one in options(self.size, plan, self.machine.per_node):
                yield Open(self.least(one, OPTIONS), next(self.numbers), OPTIONS, one)
        else:
            for one in orders(self.size, plan, self.schedules):
                yield Open(self.step(one).bound(), next(self.numbers), SCHEDULE, one)

    def least(self, plan: Plan, level: int) -> float:
        """Return a time that nothing inside of an open one beats: the work of its busiest rank.

        With m micro-batches it has m times ceil(L/p) blocks, or a p-th of all blocks and the head,
        whichever is more; with the options for which that is least, of an OPTIONS one its own.
        Fewer micro-batches never take longer, so that a mesh has the time of one micro-batch.
        """
        blocks, p, b = self.size.layers, plan.pp, self.batch // (plan.dp * plan.micro_batches)
        inside = options(self.size, plan)
        times = []
        for one in [plan] if level == OPTIONS else (one for one in inside if one.zero == 0):
            block = block_of(self.size, one, self.machine, b)
            each, head = block.whole.total, block.head.total
            times.append(max(ceil(blocks / p) * each, (blocks * each + head) / p))
        return plan.micro_batches * min(times)

    def leanest(self, level: int, plan: Plan) -> Iterator[Plan]:
        """Yield the leanest plans below an open node."""
        if level == OPTIONS:
            yield plan
            return
        m = micro_batches(self.batch, plan)[-1] if level == MESH else plan.micro_batches
        last = replace(plan, micro_batches=m, sequence=splits(self.size, plan))
        for recompute, zero in product(reversed(RECOMPUTE), reversed(zero_stages(plan))):
            yield replace(last, recompute=recompute, zero=zero)  # stage 3 has the most buffers

    def misfit(self, plans: Iterable[Plan]) -> tuple[Plan, Held] | None:
        """Return the plan that holds least under any schedule, and its bytes; None if one fits."""
        plans = list(plans)
        smallest: tuple[Plan, Held] | None = None
        if min(least_states(self.size, plan) for plan in plans) > self.machine.memory:
            one = next(orders(self.size, plans[0], self.schedules))
            return one, fullest(self.size, one, self.batch)
        limit = inf
        for plan in plans:
            if least_bytes(self.size, plan, self.batch) > limit:
                continue
            for one in orders(self.size, plan, self.schedules):
                held = fullest(self.size, one, self.batch, limit)
                if held and sum(held.values()) <= self.machine.memory:
                    return None
                if held and sum(held.values()) < limit:
                    smallest, limit = (one, held), sum(held.values())
        return smallest

    def drop(self, plan: Plan, held: Held, leanest: bool = False) -> None:
        """Keep what does not fit: of each mesh and schedule, what holds least."""
        key = (*mesh_of(plan), plan.schedule, plan.chunks)
        known = self.too_large.get(key)
        if known is None or sum(held.values()) < sum(known[1].values()):
            self.too_large[key] = plan, held, leanest

    def misfits(self) -> list[Estimate]:
        """Return the estimates of plans that do not fit, sorted by their bytes."""
        result = []
        for plan, held, leanest in self.too_large.values():
            step = self.step(plan)
            one = step.estimate(step.bound(), held, simulated=False)
            result.append(replace(one, why=why_too_large(one, leanest)))
        return sorted(result, key=lambda e: e.held)

    def step(self, plan: Plan) -> Step:
        return Step(self.size, plan, self.machine, self.batch)

    def others(self, wanted: int, known: Container[tuple]) -> list[Estimate]:
        """Return the best plan of each of `wanted` meshes that are not known, simulated, sorted.

        Of the meshes that are open, and in which a plan fits, those with the least bounds.
        """
        heaps: dict[tuple, list[Open]] = {}
        for one in sorted(self.open):  # a sorted list is a heap
            heaps.setdefault(mesh_of(one.plan), []).append(one)
        best = (next(self.best(1, heap), None) for mesh, heap in heaps.items() if mesh not in known)
        return sorted(islice(filter(None, best), wanted), key=lambda e: e.seconds)

    def nothing_fits(self) -> str:
        if not self.too_large:
            ranks = self.machine.ranks
            return f"no mesh of {ranks} ranks divides this model and {self.batch} examples"
        least = self.misfits()[0]
        return f"nothing fits; the leanest plan, {in_short(least.plan)}, {least.why}"


def mesh_of(plan: Plan) -> tuple:
    return plan.dp, plan.pp, plan.tp, plan.cp, plan.ep


def least_states(size: TransformerSize, plan: Plan) -> float:
    """Return the bytes of parameters, gradients and optimizer of a p-th of the blocks."""
    widths, block, data = BYTES[plan.precision, 16], block_parameters(size, plan), plan.sharing
    P, s = block.dense + block.experts, block.dense / data + block.experts * plan.ep / data
    held = zero_elements(plan.zero, float(P), s, 0.0)
    return size.layers / plan.pp * sum(n * width for n, width in zip(held, widths, strict=True))


def least_bytes(size: TransformerSize, plan: Plan, batch: int) -> float:
    """Return `least_states`, and what a p-th of the blocks keeps of one micro-batch."""
    kept = minidist(size, plan, micro_batch(plan, batch))
    return least_states(size, plan) + size.layers / plan.pp * kept.block
