"""Layer-split model parallelism, naively: contiguous layers on ranks, one micro-batch at a time.

    rank 0   F0          B0 F1          B1        of p ranks only one works at any time:
    rank 1      F0    B0       F1    B1           the others hold their part of the model
    rank 2         F0             F0              and wait, (p - 1) / p of the time

What it saves is memory: each rank has its layers' parameters, gradients and optimizer state, and
one micro-batch's activations. (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012,
section 3, split a model over machines by its nodes; cuts between layers are a special case.)
"""

from collections.abc import Iterator

from minidist.pipeline_parallel.actions import Action, Backward, Forward


def layer_split(rank: int, p: int, m: int) -> Iterator[Action]:
    """One at a time: the next micro-batch starts when the backward of the last one has ended."""
    for i in range(m):
        yield Forward(i)
        yield Backward(i)
