"""What trains: the methods that every strategy with synchronous updates has, on each of its ranks.

    trainer.backward(batch)                             # the whole batch's gradient, over all ranks
    optimizer.clip_global_norm(1.0, trainer.sum_squares)
    trainer.step(optimizer)                             # all ranks have the new weights
    loss = trainer.evaluate(batch)                      # forward alone, without dropout

Each axis ends in Trainers: DataParallel, Zero; Pipeline, Siamese; TensorParallel,
SpatialParallel; ContextParallel; ExpertParallel; and Hybrid, which combines axes. A training loop,
a checkpoint and a test that know these methods need not know which strategy they train. The loss is
the model's, `model.loss`, which may be set: `model.loss = nn.squared_error`. Where the vocabulary
is cut, it is the cross entropy. A strategy says what is cut, and inherits the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from minidist.autograd import Tensor, no_grad
from minidist.autograd.losses import scaled
from minidist.autograd.recording import is_recording
from minidist.backend import Array, host_copy
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Module, Parameter, move_biases
from minidist.nn.datasets import Batch
from minidist.parallel import gradient, load_own, shapes_of
from minidist.parallel.mixed_precision import AnyOptimizer


class WholeBatches:
    """Whether the gradient is of whole batches: one that an error has ended leaves nothing behind.

    drop    () -> None: drops what is left of a batch that an error has ended
    stuck   what `drop` cannot mend, and what to do then; the next batch is refused with it
    broken  whether an error has ended the last batch, or one has begun
    """

    def __init__(self, drop: Callable[[], None], stuck: str = ""):
        self.drop, self.stuck = drop, stuck
        self.broken = self.open = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Compute the gradient of a batch in the `with` block; one inside of it is a part of it."""
        if self.open:
            yield
            return
        self.check_stuck()
        if self.broken:
            self.drop()
        self.broken = self.open = True
        try:
            yield
        finally:
            self.open = False
        self.broken = False  # an error does not come here

    @contextmanager
    def forward_alone(self) -> Iterator[None]:
        """Run forward passes in the `with` block; gradients stay as they are."""
        self.check_stuck()
        before, self.broken = self.broken, self.broken or bool(self.stuck)
        yield
        self.broken = before

    def check_stuck(self) -> None:
        if self.broken and self.stuck:
            raise WrongInput(f"an error ended an earlier batch in the middle, and {self.stuck}")

    def check(self) -> None:
        """Raise ValueError if a step would be one with a part of a gradient."""
        if self.broken:
            raise WrongInput(
                "an error ended the last batch in the middle, and its gradient is not whole; call "
                "backward for a batch before the step"
            )


STAGES_SENT = (
    "what its stages have sent is still on its way; make the model and its trainer anew, and load "
    "the state"
)


class AllHeld:
    """What an optimizer updates where a rank updates all parameters that it holds."""

    def __init__(self, held: Callable[[], list[Parameter]]):
        self.held = held  # asked each time: a layer may have been replaced since

    def parameters(self) -> list[Parameter]:
        return self.held()

    def drop(self) -> None:
        """Drop what an error has left of a batch, but for the parameters' gradients."""

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update what this rank updates, and give all ranks the new weights."""
        optimizer.step()

    def gradients(self) -> dict[str, Array]:
        """Return by name the gradients that the parameters do not have: none."""
        return {}

    def weights(self) -> dict[str, Array]:
        """Return by name the weights that the parameters do not have now: none."""
        return {}

    def load(self, model: Module, state: dict[str, np.ndarray]) -> None:
        model.load_state(state)


class Trainer:
    """This rank's part of a model; by default each rank has a copy of all of it.

    A strategy cuts the model before `__init__`, and overrides what differs from that:

    share          which part of a batch this rank gets
    sum_gradients  which gradients are then parts of a sum
    run_forward    the loss of this rank's micro-batches, without a graph
    total          the whole batch's loss, from this rank's
    whole          the arrays of all parameters, from those that this rank has

    model          what this rank runs
    shapes         of the whole model's arrays, by name; by default of this one's
    check_group    ranks that must load the same state, or None to skip this comparison
    micro_batches  of each rank's part of a batch
    copies         what this rank's optimizer updates: all that it holds, or shards of it
    sum_squares    this rank's own sum of squares -> the sum over all ranks, in which every
                   parameter counts once; None: each rank has the whole gradient
                   (Optimizer.clip_global_norm)
    """

    sum_squares: Callable[..., float] | None = None

    def __init__(
        self,
        model: Module,
        group: Group,
        shapes: dict[str, tuple[int, ...]] | None = None,
        check_group: Group | None = None,
        micro_batches: int = 1,
    ):
        self.model, self.group, self.m = model, group, micro_batches
        self.loss_group = group.split(0)  # the ledger of `group` has what the strategy sends, alone
        self.shapes = shapes_of(model) if shapes is None else shapes
        self.check_group, self.batches = check_group, WholeBatches(self.drop)
        self.copies = AllHeld(model.parameters)

    @property
    def groups(self) -> list[Group]:
        """All groups that it communicates through, each with a ledger."""
        return [self.group, self.loss_group]

    def parameters(self) -> list[Parameter]:
        """Return the parameters, or shards of them, that this rank's optimizer updates."""
        return self.copies.parameters()

    def named_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of which this rank has all or a part, by their global names."""
        return self.model.named_parameters()

    def share(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch: by default, of its examples."""
        return batch.share(self.group.rank, self.group.size)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return self.share(batch).micro_batches(self.m)

    def sum_gradients(self) -> None:
        """Make the gradients of this rank's part of a batch those of the whole batch."""
        raise NotImplementedError

    def total(self, loss: Array) -> float:
        """Return the whole batch's loss: by default, the sum of the ranks' parts."""
        # In the order of ranks, as MPI's and NCCL's sums are not: no sum of a gradient is meant.
        return float(sum(self.loss_group.all_gather(loss.reshape(1), label="loss")))

    def whole(self, own: dict[str, Array]) -> dict[str, np.ndarray]:
        """Return copies of whole arrays on the host, given what this rank has of parameters."""
        return {name: host_copy(array) for name, array in own.items()}

    def backward(self, batch: Batch) -> float:
        """Compute the whole batch's gradient, in this rank's parameters; return its loss."""
        total, parts = 0.0, self.micro_batches(batch)
        with self.batches.batch():
            for number, part in enumerate(parts, 1):
                loss = loss_of(self.model, part)
                total = total + loss.data
                self.accumulate(loss, last=number == len(parts))
        return self.total(total)

    def accumulate(self, loss: Tensor, last: bool = True) -> None:
        """Add the gradient of a micro-batch's loss; with the last one, sum over the ranks."""
        loss.backward()
        if last:
            self.sum_gradients()

    def drop(self) -> None:
        """Drop what is left of a batch that an error has ended."""
        self.model.zero_grad()
        self.copies.drop()

    def evaluate(self, batch: Batch) -> float:
        """Return the whole batch's loss, without dropout and gradient, in the mode of `eval`."""
        parts = self.micro_batches(without_dropout(batch))
        with evaluating(self.model):
            return self.total(self.run_forward(parts))

    def run_forward(self, batch: list[Batch]) -> Array:
        """Return the loss of these micro-batches, on this rank."""
        return sum(loss_of(self.model, part).data for part in batch)

    def step(self, optimizer: AnyOptimizer) -> None:
        """Update what this rank updates; give every rank the new weights; drop the gradients."""
        self.batches.check()
        update(optimizer, self.model, partial(self.copies.step, optimizer))

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the whole gradients by name, on every rank and on the host, before the step."""
        held = {name: gradient(p) for name, p in self.named_parameters().items()}
        return self.whole(held | self.copies.gradients())

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights of the whole model, on every rank and on the host, by name."""
        held = {name: p.data for name, p in self.named_parameters().items()}
        return self.whole(held | self.copies.weights())

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy the whole model's arrays, the same on every rank, into what this rank has."""
        load_own(self.model, state, self.shapes, self.check_group, self.copies.load)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Compute without gradients, in the mode of evaluation; then be in the mode of before."""
    modes = [(m, m.training) for m in model.modules(Module) if hasattr(m, "training")]
    model.eval()
    try:
        with no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def without_dropout(batch: Batch) -> Batch:
    """Return a batch of which no layer drops anything: masks need a seed."""
    return replace(batch, seed=None)


def loss_of(model: Module, part: Batch) -> Tensor:
    """Return a model's loss for a part of a batch, whose gradient is scaled as the batch says."""
    if is_recording():
        check_scale(model, part)
    logits = model(part.inputs, part)
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
