"""What trains: the methods that every strategy with synchronous updates has, on each of its ranks.

    trainer.backward(batch)                             # the whole batch's gradient, over all ranks
    optimizer.clip_global_norm(1.0, trainer.sum_squares)
    trainer.step(optimizer)                             # all ranks have the new weights

DataParallel, Zero, Pipeline and Hybrid are Trainers. A training loop, a checkpoint and a test that
know these methods need not know which strategy they train. The loss is the model's, `model.loss`,
which may be set: `model.loss = nn.squared_error`. Hybrid refuses all but the cross entropy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import scaled
from minidist.backend import Array
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.errors import WrongInput
from minidist.nn import Module, Parameter, move_biases


class AnyOptimizer(Protocol):
    """An Optimizer, or MixedPrecision around one."""

    lr: float
    steps: int

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    @property
    def loss_scale(self) -> float: ...

    def clip_global_norm(
        self, max_norm: float, sum_squares: Callable[[float], float] | None = None
    ) -> float | Array: ...

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class Trainer(Protocol):
    """This rank's part of a model.

    groups       all groups that it communicates through, each with a ledger
    sum_squares  this rank's own sum of squares -> the sum over all ranks, in which every parameter
                 counts once; None: each rank has the whole gradient (Optimizer.clip_global_norm)
    """

    @property
    def groups(self) -> list[Group]: ...

    @property
    def sum_squares(self) -> Callable[[float], float] | None: ...

    def parameters(self) -> list[Parameter]:
        """Return what this rank's optimizer updates: parameters, or shards of them."""

    def named_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of which this rank has all or a part, by their global names."""

    def backward(self, batch: Batch) -> float:
        """Compute the gradient of a batch that every rank has; return the whole batch's loss."""

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update what this rank updates; give all ranks the new weights; drop the gradients."""

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into what this rank has."""


class WholeBatches:
    """Whether the gradient is of whole batches: one that an error has ended leaves nothing behind.

    model   what has gradients; they are dropped before the next batch
    sends   whether stages send each other what only the rest of the batch receives
    broken  whether an error has ended the last batch, or one has begun
    """

    def __init__(self, model: Module, sends: bool = False):
        self.model, self.sends, self.broken = model, sends, False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Compute the gradient of a batch, or of a part of one, in the `with` block."""
        if self.broken and self.sends:
            raise WrongInput(
                "an error ended an earlier batch in the middle, and what its stages have sent is "
                "still on its way; make the model and its trainer anew, and load the state"
            )
        if self.broken:
            self.model.zero_grad()
        self.broken = True
        yield
        self.broken = False  # an error does not come here

    def check(self) -> None:
        """Raise ValueError if a step would be one with a part of a gradient."""
        if self.broken:
            raise WrongInput(
                "an error ended the last batch in the middle, and its gradient is not whole; call "
                "backward for a batch before the step"
            )


def loss_of(model: Module, part: Batch) -> Tensor:
    """Return a model's loss for a part of a batch, whose gradient is scaled as the batch says."""
    check_scale(model, part)
    logits = model(part.inputs, part.randomness)
    loss = model.loss(logits, part.targets, reduction_size=part.total)
    return scaled(loss, part.loss_scale)


def check_scale(model: Module, part: Batch) -> None:
    """Raise ValueError if the optimizer divides by a loss scale that the batch does not have."""
    firsts = [p for layer in model.layers if layer.flat for p in layer.flat.parameters[:1]]
    homes = [p.summed_in.home for p in firsts]
    scales = {home.scale.value for home in homes if home is not None and home.scale is not None}
    if part.loss_scale == 1 and scales - {1}:
        raise WrongInput(
            f"the optimizer divides gradients by its loss scale {max(scales)}, and the batch has "
            "none; use Batch(..., loss_scale=optimizer.loss_scale)"
        )


def update(optimizer: AnyOptimizer, model: Module, step: Callable[[], None] | None = None) -> None:
    """Update the weights; move the biases of routers, unless the step was skipped; drop both sums.

    The optimizer skips a step whose gradients overflow (mixed_precision.py).

    step  by default optimizer.step
    """
    before = optimizer.steps
    (step or optimizer.step)()
    move_biases(model, moved=optimizer.steps > before)
    optimizer.zero_grad()
