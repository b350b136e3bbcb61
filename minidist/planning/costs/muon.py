"""What Muon adds to a mesh: the parts of matrices that travel, and its state.

Letters as in replicas/whole_matrices.py: S of a matrix, H of all its parts, h of its owner's.
"""

from bisect import bisect_right
from dataclasses import replace
from itertools import groupby, product

from minidist.optim.muon import hidden_matrices
from minidist.pieces import split_ends
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload
from minidist.planning.costs.expert_parallel import expert_numbers
from minidist.planning.costs.hybrid import MeshSplit, hybrid_bytes, hybrid_costs, split_of
from minidist.planning.costs.layers import holders_of_heads
from minidist.planning.costs.pipeline_parallel import layout
from minidist.planning.costs.tensor_parallel import repeated
from minidist.replicas.whole_matrices import owners_of

Held = dict[str, dict[int, int]]  # {matrix: {rank: how many of its elements the rank updates}}


def muon_bytes(case: Workload, N: int) -> int:
    """Return the bytes of all steps on a mesh, and in each (S - h) + (H - h) of every matrix.

    owners = "every": S - h for each rank that holds a part.
    """
    held, named = held_matrices(case, N), case.model.named_parameters()
    owners = owners_of({n: named[n].shape for n in held}, {n: [*held[n]] for n in held})
    travel = 0
    for name, parts in held.items():
        S, h = named[name].size, parts[owners[name]]
        if case.options.get("owners", "one") == "every":
            travel += sum(S - own for own in parts.values())
        else:
            travel += S + sum(parts.values()) - 2 * h
    steps = max(1, steps_of(case.model, case.options.get("steps", 0)))
    return steps * (hybrid_bytes(case, N) + ITEMSIZE * travel)


def steps_of(model, steps: int) -> int:
    """Return how many steps are taken: at most one with experts, whose rows then go elsewhere."""
    return min(steps, 1) if getattr(model, "experts", 0) else steps


def muon_costs(case: Workload, N: int) -> list[Cost]:
    """Of a step: a matrix has one array of state, where AdamW has two."""
    held, costs = held_matrices(case, N), []
    for rank, cost in enumerate(hybrid_costs(case, N)):
        saved = ITEMSIZE * sum(parts.get(rank, 0) for parts in held.values())
        state = cost.held["optimizer state"] - saved
        costs.append(replace(cost, held=cost.held | {"optimizer state": state}))
    return costs


def held_matrices(case: Workload, N: int) -> Held:
    """Return which ranks update how many elements of each matrix."""
    s, experts = split_of(N, **case.options), expert_numbers(case)
    found: Held = {}
    cut, _, _ = layout(case.model, s.order)
    for rank, (d, p, c, _) in enumerate(product(*map(range, (s.dp, s.pp, s.cp, s.tp)))):
        for i in (i for k in s.order.placement[p] for i in cut[k]):
            for name, own in held_of_layer(case, s, (d, c), i, experts).items():
                found.setdefault(name, {})[rank] = own
    return found


def held_of_layer(
    case: Workload, s: MeshSplit, place: tuple[int, int], i: int, experts: set[str]
) -> dict[str, int]:
    """Return how many elements of layer i's matrices are updated at a place of dp and cp.

    With ZeRO, each run of dense parameters is cut over dp x cp, each run of experts over dp/ep x cp
    """
    named, (d, c), found = case.model.layers[i].named_parameters(), place, {}
    whole, trained = set(repeated(named)), [n for n, p in named.items() if p.requires_grad]
    here = [n for n in trained if n not in experts or expert_rank(case, n, s.ep) == d % s.ep]
    runs = [(is_expert, [*run]) for is_expert, run in groupby(here, key=experts.__contains__)]
    for is_expert, run in sorted(runs, key=lambda pair: pair[0]):  # as Hybrid.copied_slices
        copied = s.tp // holders_of_heads(case.model, s.tp)  # the parts of keys and values
        parts = {n: 1 if n in whole else copied if "key_value" in n else s.tp for n in run}
        sizes = {n: named[n].size // number for n, number in parts.items()}
        ranks, r = (s.dp // s.ep * s.cp, d // s.ep) if is_expert else (s.dp * s.cp, d)
        ranks = (case.options.get("shards") or ranks) if s.zero else 1
        ends, own = split_ends(sum(sizes.values()), ranks), (r * s.cp + c) % ranks
        at, (start, stop) = 0, ends[own : own + 2]
        for name, size in sizes.items():
            part = min(stop, at + size) - max(start, at)
            if part > 0 and hidden_matrices(name, named[name].shape):
                found[name] = part
            at += size
    return found


def expert_rank(case: Workload, name: str, ep: int) -> int:
    """Return which rank of ep has the expert that a parameter belongs to."""
    number = int(name.partition(".experts.")[2].partition(".")[0])
    return bisect_right(split_ends(case.model.experts, ep), number) - 1
