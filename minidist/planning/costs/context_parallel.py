"""What a sequence cut over ranks moves, holds and computes.  N ranks hold T_0, ..., T_(N-1) of T.

C numbers of Q or O per position, of H heads; kv numbers of K, and of V: C, or C K/H where queries
are grouped.
"""

import math
from collections.abc import Callable
from functools import partial

from minidist.attention_scores import computed_scores, in_one_piece, kept_scores
from minidist.context_parallel.cuts import union, zigzag
from minidist.nn import mixtures
from minidist.pieces import Positions
from minidist.planning.costs.attention import (
    gathered_bytes,
    ring_bytes,
    ring_scores,
    ulysses_bytes,
    usp_bytes,
)
from minidist.planning.costs.cost import (
    ITEMSIZE,
    Cost,
    Workload,
    cost_of,
    loads_bytes,
    positions_of,
    trained_bytes,
)
from minidist.planning.costs.gradients import Needs, needed, needed_at
from minidist.planning.costs.layers import heads_of, kv_heads_of, transformer_layers, width_of
from minidist.planning.costs.transformer_size import TransformerSize


def context_bytes(case: Workload, N: int, attention: str) -> int:
    """Return the bytes of every layer's attention and choices, and of what is summed at the end."""
    sizes, U = [len(own) for own in held_by(case, N)], case.options.get("ulysses", 1)
    sent = attention_bytes(case, sizes, attention, U)
    summed = 2 * (N - 1) * trained_bytes(case.model) + loads_bytes(case.model, N)
    return blocks_bytes(sent, needed(case.model)) + choices_bytes(case, N) + summed


def attention_bytes(
    case: Workload, sizes: list[int], attention: str, U: int = 1, tp: int = 1
) -> list[tuple[int, int]]:
    """Return the bytes of one layer's forward and backward, from each rank with its tp neighbours.

    sizes  positions of each rank
    U      neighbours that exchange heads, by which heads of keys and values are repeated if they
           are no multiple: see ulysses.py
    """
    H, n = heads_of(case.model), ITEMSIZE * len(case.inputs) * width_of(case.model)
    K = max(1, kv_heads_of(case.model) // tp)
    shared = len(sizes) if attention == "ulysses" else U
    kv = n * tp * math.lcm(K, shared) // H
    layer = OVER_RANKS[attention][0]
    return layer(sizes, n, kv) if U == 1 else usp_bytes(sizes, n, kv, U=U, attention=layer)


def blocks_bytes(sent: list[tuple[int, int]], layers: list[Needs]) -> int:
    """Return the bytes of attention in every block's forward, and in backward where a gradient is.

    sent  per rank: bytes of one block's forward and backward
    """
    forward, backward = map(sum, zip(*sent, strict=True))
    back = [met for met in layers[1:-1] if needed_at(met, "attention.output.weight")]
    return forward * len(layers[1:-1]) + backward * len(back)


def choices_bytes(case: Workload, N: int) -> int:
    """Return the bytes of an all_gather, per block with experts, of k whole numbers per position.

    Every rank needs the experts that all positions chose (context_parallel/transformer.py).
    """
    return (N - 1) * case.inputs.size * sum(8 * mixture.top_k for mixture in mixtures(case.model))


def held_by(case: Workload, N: int) -> list[Positions]:
    """Return the positions of each rank, by the cut of the case."""
    return case.options.get("cut", zigzag)(case.inputs.shape[1], N)


def ring_keeps(C: int, H: int, held: list[Positions], kv: int) -> list[tuple[int, int]]:
    """Return, per rank and example, the numbers that attention keeps, and its multiply-adds.

    Q, K, V, O and log Z of the rank's positions, whatever the length of the sequence.
    """
    return [(len(own) * (2 * C + 2 * kv + H), 2 * C * ring_scores(own)) for own in held]


def gathered_keeps(C: int, H: int, held: list[Positions], kv: int) -> list[tuple[int, int]]:
    """Return, per rank and example, the numbers that attention keeps, and its multiply-adds.

    Q, O and log Z of the rank's positions, K and V of all.
    """
    whole = 2 * held[0].length * kv
    return [(len(own) * (2 * C + H) + whole, 2 * C * ring_scores(own)) for own in held]


def ulysses_keeps(C: int, H: int, held: list[Positions], kv: int) -> list[tuple[int, int]]:
    """Return, per rank and example, the numbers that Ulysses keeps, and its multiply-adds.

    Q, K, V and what else attention keeps of the rank's heads, O of its positions. K and V are kept
    once for each query head. O is kept a second time, of the heads, where probabilities are
    computed again in backward.
    """
    T, N = held[0].length, len(held)
    vectors = 3 if in_one_piece(T) else 4
    of_heads = (vectors * T * C + H * kept_scores(T)) // N
    return [(of_heads + len(own) * C, 2 * C * computed_scores(T) // N) for own in held]


def usp_keeps(
    C: int, H: int, held: list[Positions], kv: int, *, U: int, keeps: Callable = ring_keeps
) -> list[tuple[int, int]]:
    """Return, per rank and example, what ring x Ulysses keeps, and its multiply-adds.

    What `keeps` says of 1/U of the heads, at the positions of U ranks; and O of the rank's own.
    """
    groups = [union(held[r : r + U]) for r in range(0, len(held), U)]
    ring = keeps(C // U, H // U, groups, kv // U)
    found = [ring[r // U] for r in range(len(held))]
    return [(kept + len(own) * C, work) for (kept, work), own in zip(found, held, strict=True)]


OVER_RANKS: dict[str, tuple[Callable, Callable]] = {  # bytes of a layer, and what a rank keeps
    "ring": (ring_bytes, ring_keeps),
    "gathered": (gathered_bytes, gathered_keeps),
    "ulysses": (ulysses_bytes, ulysses_keeps),
}


def keeps_of(attention: str, U: int = 1) -> Callable:
    """Return the function (C, H, held, kv) -> what each rank keeps, and its multiply-adds."""
    keeps = OVER_RANKS[attention][1]
    return keeps if U == 1 else partial(usp_keeps, U=U, keeps=keeps)


def context_costs(case: Workload, N: int, attention: str) -> list[Cost]:
    """Return every rank's cost: all layers at its positions, by `keeps_of` the attention.

    Work is that of windows of one document: of several it is less, and nothing else differs.
    """
    size, held, B = TransformerSize.of(case.model), held_by(case, N), len(case.inputs)
    keeps = keeps_of(attention, case.options.get("ulysses", 1))
    kept, P = (
        keeps(size.width, size.heads, held, size.key_width),
        sum(p.size for p in case.model.parameters()),
    )
    return [
        cost_of(transformer_layers(size, len(own), attention=each), B, len(own), (P, P, 2 * P))
        for own, each in zip(held, kept, strict=True)
    ]


def balance(case: Workload, N: int, attention: str) -> float:
    """Return the mean work of the ranks over the busiest one's: 1 if none waits for another."""
    work = [cost.work for cost in context_costs(case, N, attention)]
    return sum(work) / (N * max(work))


def positions_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return positions_of(case), "positions"
