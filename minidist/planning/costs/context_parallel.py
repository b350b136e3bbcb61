"""What a sequence cut over ranks moves, holds and computes.  N ranks hold T_0, ..., T_(N-1) of T.

One of Q, K, V or O has n bytes per position, for all examples and heads.
"""

from collections.abc import Callable
from functools import partial

from minidist.attention_scores import computed_scores, in_one_piece, kept_scores
from minidist.context_parallel.cuts import zigzag
from minidist.nn import mixtures
from minidist.pieces import Positions
from minidist.planning.costs.attention import ring_scores
from minidist.planning.costs.cost import (
    ITEMSIZE,
    Cost,
    Workload,
    cost_of,
    positions_of,
    trained_bytes,
)
from minidist.planning.costs.gradients import Needs, needed, needed_at
from minidist.planning.costs.layers import heads_of, transformer_layers, width_of
from minidist.planning.costs.transformer_size import TransformerSize


def context_bytes(case: Workload, N: int, attention: Callable) -> int:
    """Return the bytes of every layer's attention and choices, and of an all_reduce at the end."""
    n = ITEMSIZE * len(case.inputs) * width_of(case.model)
    sent = attention([len(own) for own in held_by(case, N)], n)
    summed = 2 * (N - 1) * trained_bytes(case.model)
    return blocks_bytes(sent, needed(case.model)) + choices_bytes(case, N) + summed


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


def ring_keeps(C: int, H: int, held: list[Positions]) -> list[tuple[int, int]]:
    """Return, per rank and example, the numbers that attention keeps, and its multiply-adds.

    Q, K, V, O and log Z of the rank's positions, whatever the length of the sequence.
    """
    return [(len(own) * (4 * C + H), 2 * C * ring_scores(own)) for own in held]


def ulysses_keeps(C: int, H: int, held: list[Positions]) -> list[tuple[int, int]]:
    """Return, per rank and example, the numbers that Ulysses keeps, and its multiply-adds.

    Q, K, V and what else attention keeps of the rank's heads, O of its positions.
    O is kept a second time, of the heads, where probabilities are computed again in backward.
    """
    T, N = held[0].length, len(held)
    vectors = 3 if in_one_piece(T) else 4
    of_heads = (vectors * T * C + H * kept_scores(T)) // N
    return [(of_heads + len(own) * C, 2 * C * computed_scores(T) // N) for own in held]


def context_costs(case: Workload, N: int, keeps: Callable) -> list[Cost]:
    """Return every rank's cost: all layers at its positions; `ring_keeps` or `ulysses_keeps`."""
    size, held, B = TransformerSize.of(case.model), held_by(case, N), len(case.inputs)
    kept, P = keeps(size.width, size.heads, held), sum(p.size for p in case.model.parameters())
    return [
        cost_of(transformer_layers(size, len(own), attention=each), B, len(own), (P, P, 2 * P))
        for own, each in zip(held, kept, strict=True)
    ]


ring_costs: Callable = partial(context_costs, keeps=ring_keeps)
ulysses_costs: Callable = partial(context_costs, keeps=ulysses_keeps)


def balance(case: Workload, N: int, costs: Callable) -> float:
    """Return the mean work of the ranks over the busiest one's: 1 if none waits for another."""
    work = [cost.work for cost in costs(case, N)]
    return sum(work) / (N * max(work))


def positions_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return positions_of(case), "positions"


def heads_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return heads_of(case.model), "heads"
