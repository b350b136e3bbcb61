"""Cuts of a sequence: a function (T, N) -> [the `Positions` of rank 0, of rank 1, ...].

    T = 8, N = 2            plain  0 0 0 0 1 1 1 1      zigzag  0 0 1 1 1 1 0 0

Letters: T positions, N ranks, r one of them. The query at position t meets t + 1 keys. So under
the plain cut the last rank computes about 2N - 1 times as much as the first. Zig-zag cuts 2N
pieces, and gives rank r the pieces r and 2N - 1 - r: then all compute the same (Dubey et al., The
Llama 3 Herd of Models, 2024, section 3.3.2). Pieces are as equal as possible, the larger first; if
T < 2N, some are empty.
"""

from collections.abc import Callable
from itertools import pairwise

from minidist.errors import WrongInput
from minidist.pieces import Positions, split_ends

Cut = Callable[[int, int], list[Positions]]


def plain(T: int, N: int) -> list[Positions]:
    """Give each rank one run of neighbours."""
    return [Positions((piece,), T) for piece in _pieces(T, N, N)]


def zigzag(T: int, N: int) -> list[Positions]:
    """Give rank r the pieces r and 2N - 1 - r of 2N."""
    pieces = _pieces(T, N, 2 * N)
    return [Positions((pieces[r], pieces[2 * N - 1 - r]), T) for r in range(N)]


def union(held: list[Positions]) -> Positions:
    """Return the positions of several ranks; runs that meet are one."""
    runs: list[tuple[int, int]] = []
    for a, b in sorted(run for positions in held for run in positions.runs):
        if runs and runs[-1][1] == a:
            a = runs.pop()[0]
        runs.append((a, b))
    return Positions(tuple(runs), held[0].length)


def _pieces(T: int, N: int, number: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each of `number` pieces; ValueError if T < N."""
    if T < N:
        raise WrongInput(
            f"cannot cut {T} positions over {N} ranks; use at least {N}, or {T} ranks at most"
        )
    return list(pairwise(split_ends(T, number)))
