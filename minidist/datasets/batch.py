"""A batch, and its parts: for a rank, and for each micro-batch of a rank.

    batch = Batch(inputs, targets, seed, step, examples)
    mine = batch.share(rank, ranks)                     # neighbours; the first ranks may have more
    for part in mine.micro_batches(m):
        loss = model.loss(model(part.inputs, part.randomness), part.targets, part.total)

A part is a Batch that knows the whole one: how many targets count in all of it, which its loss is
divided by, so that gradients of parts only have to be summed; and which examples these are, so that
dropout drops the same elements wherever an example is computed.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import IGNORED, counted
from minidist.backend import Array
from minidist.datasets.sampler import example_indices, shard
from minidist.errors import WrongInput
from minidist.pieces import Positions
from minidist.rng import Randomness


@dataclass(frozen=True, eq=False)
class Batch:
    """What a step learns from, or a part of it.

    inputs      tokens or floats [B, ...], an array or a tensor
    targets     what the loss takes, [B, ...]
    seed, step  of the dropout masks
    examples    global indices of the examples, [B]; by default 0, 1, ...
    loss_scale  what multiplies the gradient, not the loss (see mixed_precision.py)
    positions   of the sequence that the columns of inputs[B, T] are; None: all
    documents   numbers of the documents that share the windows [B, T], see Randomness
    total       number of targets that count in the whole batch; by default in this one
    size        number of examples of the whole batch; by default of this one
    counted     the positions that count in the balance of experts, [B, T] of whole sequences; by
                default those whose targets count, if each position has one
    randomness  of these examples: pass it to the model
    """

    inputs: Tensor | Array
    targets: Array
    seed: int = 0
    step: int = 0
    examples: np.ndarray = None  # type: ignore[assignment]  # __post_init__ replaces None
    loss_scale: float = 1.0
    positions: Positions | None = None
    total: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    size: int | None = None
    documents: np.ndarray | None = None
    counted: Array | None = None
    randomness: Randomness = field(init=False, repr=False)

    def __post_init__(self) -> None:
        examples = example_indices(self.inputs, self.targets, self.examples)
        size = len(examples) if self.size is None else self.size
        total = counted(self.targets) if self.total is None else self.total
        in_balance, integers = self.counted, self.targets.dtype.kind in "iu"
        if in_balance is None and self.positions is None and integers and self.targets.ndim == 2:
            in_balance = self.targets != IGNORED
        randomness = Randomness(
            self.seed,
            self.step,
            examples,
            size,
            positions=self.positions,
            loss_scale=self.loss_scale,
            documents=self.documents,
            counted=in_balance,
            total=total,
        )
        derived = {
            "examples": examples,
            "total": total,
            "size": size,
            "counted": in_balance,
            "documents": randomness.documents,
            "randomness": randomness,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self, rows: np.ndarray) -> "Batch":
        """Return the part with these rows."""
        x, y = self.inputs[rows], self.targets[rows]
        own = {"examples": self.examples[rows]}
        for name in ("documents", "counted"):
            numbers = getattr(self, name)
            own[name] = None if numbers is None else numbers[rows]
        return replace(self, inputs=x, targets=y, **own)

    def share(self, rank: int, ranks: int) -> "Batch":
        """Return one rank's part, as even as can be, perhaps empty."""
        return self.rows(shard(np.arange(len(self)), rank, ranks))

    def micro_batches(self, m: int) -> list["Batch"]:
        """Cut it into m parts, as even as can be; if m > B some are empty."""
        if m < 1:
            raise WrongInput(f"a batch is cut into 1 micro-batch or more, not {m}")
        return [self.share(i, m) for i in range(m)]
