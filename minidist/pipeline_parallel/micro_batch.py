"""Micro-batches: the parts of a batch that go through a pipeline one after the other."""

from dataclasses import dataclass

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import counted
from minidist.backend import Array
from minidist.datasets import example_indices
from minidist.positions import Positions
from minidist.rng import Randomness


@dataclass(frozen=True)
class MicroBatch:
    """Examples that go through the pipeline together.

    inputs      tokens or floats [B/m, ...], an array or a tensor; the first stage needs them
    targets     what the loss takes; the last stage needs them
    randomness  of these examples, for dropout
    total       number of targets that count in the whole batch: the loss is divided by it
    """

    inputs: Tensor | Array
    targets: Array
    randomness: Randomness | None
    total: int


def micro_batches(
    inputs: Array,
    targets: Array,
    m: int,
    seed: int = 0,
    step: int = 0,
    examples=None,
    total: int | None = None,
    batch: int | None = None,
    positions: Positions | None = None,
    loss_scale: float = 1.0,
) -> list[MicroBatch]:
    """Cut a batch into m micro-batches, as even as can be; if m > B some are empty.

    examples  global indices of the batch's examples, [B]; by default 0, 1, ...
    total     number of targets to divide the loss by; by default this batch's that count
    batch     number of examples of the whole update; by default this batch's
    positions of the sequence that the columns of inputs[B, T] are; by default all
    loss_scale  what multiplies the gradient that enters backward
    """
    if m < 1:
        raise ValueError(f"a batch is cut into 1 micro-batch or more, not {m}")
    examples = example_indices(inputs, targets, examples)
    total = counted(targets) if total is None else total
    batch = len(inputs) if batch is None else batch
    return [
        MicroBatch(
            inputs[part],
            targets[part],
            Randomness(seed, step, examples[part], batch, positions, loss_scale),
            total,
        )
        for part in np.array_split(np.arange(len(inputs)), m)
    ]
