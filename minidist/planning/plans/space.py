"""The plans that a search may try: meshes, micro-batches, options and schedules of one model."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import gcd, isqrt

from minidist.errors import WrongInput, check_name
from minidist.pipeline_parallel.schedules import MOST_PASSES, SCHEDULES
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import ASYNCHRONOUS, RECOMPUTE, V_SHAPED, Plan

GROUPS = "interleaved", "interleaved_zb"  # of p micro-batches
LEFT_OUT = "layer_split", "zb_auto"  # always waits; is a search of its own, for measured times
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
