"""Interleaved 1F1B with backward in two halves: weight halves fill the bubble, over any v chunks.

The order of PyTorch's ScheduleInterleavedZeroBubble: the rule of ZB-H1 (Qi et al. 2024, section
2.1; see zero_bubble.py), for a rank's m v passes in the order of `interleaved` (Narayanan et al.
2021, section 2.2.2) instead of its m micro-batches.

    p = 2, v = 2, m = 2; lower case: chunk 1

    rank 0   F0 F1 f0 f1    i0 w0 i1 w1 I0 W0 I1 W1
    rank 1      F0 F1 f0 i0 f1 i1 w0 I0 w1 I1 W0 W1

A rank idles (p - 1)(TF + TI - TW) / v if TW <= TF and TW <= TI: a third of `interleaved` where all
three are equal. The stash of every rank peaks at p stages, whatever v: (p - 1) / v less than on the
first rank of `interleaved`. m is a multiple of p. v = 1 is `zb_h1`.
"""

from collections.abc import Iterator

from minidist.pipeline_parallel.actions import Action, Forward
from minidist.pipeline_parallel.interleaved import interleaved
from minidist.pipeline_parallel.zero_bubble import late_weights


def interleaved_zb(rank: int, p: int, m: int, chunks: int) -> Iterator[Action]:
    """v p - rank forwards; then in turn an input half, the weight half `rank` before it, a forward.

    late_weights numbers the passes; the order of `interleaved` says which ones they are.
    """
    order = list(interleaved(rank, p, m, chunks))
    forwards = [a for a in order if isinstance(a, Forward)]
    backwards = [a for a in order if not isinstance(a, Forward)]
    for a in late_weights(m * chunks, ahead=chunks * p - rank, late=rank):
        place = (forwards if isinstance(a, Forward) else backwards)[a.micro_batch]
        yield type(a)(place.micro_batch, place.chunk)
