"""GPipe: micro-batches, so that all stages work at once.

Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism
(NeurIPS 2019): the order in section 2.2 and figure 2c, the bubble in 2.3.

    rank 0   F0 F1 F2 F3                   B3 B2 B1 B0
    rank 1      F0 F1 F2 F3             B3 B2 B1 B0
    rank 2         F0 F1 F2 F3       B3 B2 B1 B0
    rank 3            F0 F1 F2 F3 B3 B2 B1 B0

A rank idles (p - 1)(TF + TB): the bubble, a fraction (p - 1)/(m + p - 1) of the whole. All m
micro-batches are in flight at once; with `recompute` a stage keeps only their inputs, at the price
of one more forward. The gradient equals the whole batch's, because the parts' gradients are summed.
"""

from collections.abc import Iterator

from minidist.pipeline_parallel.actions import Action, Backward, Forward


def gpipe(rank: int, p: int, m: int) -> Iterator[Action]:
    """Fill, then drain."""
    yield from map(Forward, range(m))
    yield from map(Backward, reversed(range(m)))
