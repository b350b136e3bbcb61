"""Zero bubble: backward in two halves; other ranks wait for the first half only.

Qi et al., Zero Bubble (Almost) Pipeline Parallelism (ICLR 2024; arXiv 2401.10241), sections 2.1
(ZB-H1), 2.2 (ZB-H2) and 2.3 (their bubbles); ZB-V: section 6 of the arXiv version. The stage before
waits for I (dX = dY W^T). No rank waits for W (dW = X^T dY), so W can fill the bubbles.

    zb_h1   at most p micro-batches in flight, as in 1F1B on its first rank:
            idle (p - 1)(TF + TI - TW); if m >= p, TW <= TF and TW <= TI
    zb_h2   at most 2p - 1 in flight: (p - 1)(TF + TI - 2 TW), counted from a rank's own start;
            if m >= 2p - 1, TW <= TF and 2 TW <= TF + TI
    zb_v    two chunks per rank, laid out as a V: a micro-batch's forward ends, and its backward
            begins, on the rank where it started. No bubble, counted from a rank's own start, with
            the memory of 1F1B; if m >= 2p - 1 and TF = TI = TW
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from minidist.pipeline_parallel.actions import (
    KINDS,
    Action,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
)


def zb_h1(rank: int, p: int, m: int) -> Iterator[Action]:
    """1F1B with weight halves delayed by `rank` micro-batches."""
    return late_weights(m, ahead=p - rank, late=rank)


def zb_h2(rank: int, p: int, m: int) -> Iterator[Action]:
    """Fill with forwards until the first backward arrives; delay weight halves by 2 `rank`."""
    return late_weights(m, ahead=2 * (p - rank) - 1, late=2 * rank)


def late_weights(m: int, ahead: int, late: int) -> Iterator[Action]:
    """`ahead` forwards; then in turn an input half, the weight half `late` before it, a forward."""
    yield from map(Forward, range(min(ahead, m)))
    for i in range(m):
        yield BackwardInput(i)
        if i >= late:
            yield BackwardWeight(i - late)
        if i + ahead < m:
            yield Forward(i + ahead)
    yield from map(BackwardWeight, range(max(0, m - late), m))


def v_shaped(p: int) -> list[list[int]]:
    """Return the placement: rank r holds the stages r and 2p - 1 - r."""
    return [[r, 2 * p - 1 - r] for r in range(p)]


def zb_v(p: int, m: int) -> Programs:
    """Return the programs of all ranks."""
    return Programs([actions_of(steps_of_v(rank, p, m), m) for rank in range(p)], v_shaped(p))


def actions_of(steps: Iterable[str], m: float = inf) -> Iterator[Action]:
    """Yield F0 F1 I0 ... for the steps F F I ...; the step F1 is a kind and a chunk.

    Each comes at most m times.
    """
    done: Counter[str] = Counter()
    for step in steps:
        if done[step] < m:
            yield KINDS[step[0]](done[step], int(step[1:] or 0))
            done[step] += 1


def steps_of_v(rank: int, p: int, m: int) -> Iterator[str]:
    """Chunk 0 is on the way down, stage `rank`; chunk 1 on the way up, stage 2p - 1 - `rank`.

    Written as runs of turns; a step is skipped where its micro-batches have run out:

        F0 x (2 (p - rank) - 1)     until the first micro-batch is back from the bottom of the V
        F1 F0 x rank                until its backward is back
        F1 I1 W1 x (p - rank)       until its gradient is back, too
        F0 I0 W0 F1 I1 W1 x (m - p) steady: every rank works all the time
        I0 I1 x rank                drain: weight halves wait while a rank still waits for dX
        I0 W0 x (p - rank)
        W1 W0 x m
    """
    for times, turn in (
        (2 * (p - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (p - rank, "F1 I1 W1"),
        (m - p, "F0 I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (p - rank, "I0 W0"),
        (m, "W1 W0"),
    ):
        yield from turn.split() * times
