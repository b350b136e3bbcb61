"""Looped breadth-first: all micro-batches pass a chunk before the next chunk begins.

Lamy-Poirier, Breadth-First Pipeline Parallelism (MLSys 2023; arXiv 2211.05953). Rank r holds the
virtual stages r, p + r, 2p + r, ... as its chunks 0 to v - 1, as in `interleaved`, which is
depth-first: p micro-batches pass all chunks before the next p start.

    p = 2, v = 2, m = 3; lower case: chunk 1

    rank 0   F0 F1 F2 f0 f1 f2       b2 b1 b0 B2 B1 B0
    rank 1      F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0

A rank idles (p - 1)(TF + TB) / v, as with `interleaved`; of fewer than p micro-batches each turn
from the last rank to the first waits for p - m more: (p - 1 + (v - 1)(p - m))(TF + TB) / v. All m
are in flight at once, as in GPipe, which is v = 1.

In exchange, a chunk works in one piece, once forward and once backward. So weights that are
sharded over other ranks are gathered twice per batch, not per micro-batch; a chunk's gradient is
complete when its piece ends, and can be reduced while the chunk below works; and m is any number.
"""

from collections.abc import Iterator

from minidist.pipeline_parallel.actions import Action, Backward, Forward


def looped_bfs(rank: int, p: int, m: int, chunks: int) -> Iterator[Action]:
    """All forwards, chunk by chunk; then all backwards, in the opposite order."""
    order = [(i, chunk) for chunk in range(chunks) for i in range(m)]
    yield from (Forward(*place) for place in order)
    yield from (Backward(*place) for place in reversed(order))
