"""Attention over ranks, hop by hop: which blocks of the causal triangle a cut gives to which rank.

A sequence in equal pieces. A cut is a name, or the rank of each piece: "00112233". In hop i rank r
has the keys and values of rank r - i. Letters: N ranks; T positions; n bytes of one of Q, K, V, O
per position. Numbers alone: no NumPy.
"""

from minidist.context_parallel.cuts import plain, zigzag
from minidist.context_parallel.tiles import QUERIES, tiles
from minidist.errors import WrongInput
from minidist.pieces import Positions
from minidist.planning.costs.layers import ring_bytes, ulysses_bytes

CUTS = {"plain": plain, "zigzag": zigzag}
TURNS = "turns"  # of Striped Attention (Brandon et al. 2023), by pieces
FIRST = {"cut": "plain", "ranks": 4, "pieces": 16, "length": 16384, "bytes": 8192}


def owners(cut: str, N: int, pieces: int) -> list[int]:
    """Return the rank of each piece."""
    if cut == TURNS:
        return [piece % N for piece in range(pieces)]
    if cut in CUTS:  # a piece in the place of a position
        held = CUTS[cut](pieces, N)
        of = {piece: r for r in range(N) for a, b in held[r].runs for piece in range(a, b)}
        return [of[piece] for piece in range(pieces)]
    if len(cut) != pieces or not set(cut) <= set("01234567"[:N]):
        raise WrongInput(
            f"a cut is plain, zigzag, turns, or the rank, 0 to {N - 1}, of each of {pieces} "
            f"pieces, such as {'0123' * pieces:.{pieces}}; not {cut!r}"
        )
    return [int(rank) for rank in cut]


def scores(pieces: int, T: int) -> list[list[int]]:
    """Return how many scores per head a block [queries' piece][keys' piece] takes; 0: skipped."""
    long = T // pieces
    runs = [Positions(((a, a + long),), T) for a in range(0, T, long)]
    return [
        [
            sum((q.stop - q.start) * (k.stop - k.start) for q, k, _ in tiles(row, keys))
            for keys in runs
        ]
        for row in runs
    ]


def work_of(owner: list[int], N: int, blocks: list[list[int]]) -> list[list[int]]:
    """Return the scores that each rank computes in each hop: work[hop][rank]."""
    work = [[0] * N for _ in range(N)]
    for q, row in enumerate(blocks):
        for k, count in enumerate(row):
            work[(owner[q] - owner[k]) % N][owner[q]] += count
    return work


def judged(cut: str, work: list[list[int]]) -> dict:
    """Return the mean rank's work over the busiest one's, and the share of the time it waits."""
    N, total = len(work), sum(map(sum, work))
    busiest, time = max(map(sum, zip(*work, strict=True))), sum(map(max, work))
    return {"cut": cut, "balance": total / (N * busiest), "idle": 1 - total / (N * time)}


def answer(cut: str, ranks: int, pieces: int, length: int, bytes: int) -> dict:
    """Return each block's hop and scores; work and bytes by hop and rank; cuts compared."""
    N, T = ranks, length
    if N not in range(2, 9) or pieces not in (8, 16, 32) or bytes not in range(1, 10**9):
        raise WrongInput(
            "this page has 2 to 8 ranks, 8, 16 or 32 pieces, and n from 1 to 999,999,999 bytes per "
            f"position, not {ranks}, {pieces} and {bytes}"
        )
    if T % (QUERIES * pieces) or not 0 < T <= 65536:
        raise WrongInput(f"use a multiple of {QUERIES * pieces} positions to 65536, not {length}")
    owner, blocks = owners(cut, N, pieces), scores(pieces, T)
    sizes, work = [owner.count(r) * (T // pieces) for r in range(N)], work_of(owner, N, blocks)
    sent = [[2 * bytes * sizes[(r - i) % N] for r in range(N)] for i in range(N - 1)]
    names = dict.fromkeys([*CUTS, TURNS, cut])
    result = {
        "owner": owner,
        "hop": [[(owner[q] - owner[k]) % N for k in range(pieces)] for q in range(pieces)],
        "blocks": blocks,
        "work": work,
        "sent": [*sent, [0] * N],  # in the last hop a rank keeps what it has
        "ring": ring_bytes(sizes, bytes),
        "ulysses": ulysses_bytes(sizes, bytes),
        "cuts": [judged(name, work_of(owners(name, N, pieces), N, blocks)) for name in names],
    }
    return {**result, "words": as_text(result)}


def as_text(answer: dict) -> str:
    N = len(answer["work"])
    lines = [f"The rank of each piece: {' '.join(map(str, answer['owner']))}."]
    for hop, (work, sent) in enumerate(zip(answer["work"], answer["sent"], strict=True)):
        for r in range(N):
            lines.append(
                f"hop {hop}: rank {r} has keys of rank {(r - hop) % N}, computes {work[r]:,} "
                f"scores per head, sends {sent[r]:,} bytes"
            )
    return "\n".join(lines)
