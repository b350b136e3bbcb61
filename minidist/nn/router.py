"""Which expert each position goes to, which choices are dropped, and a bias that balances them.

Letters: E experts, k choices per position, R rows: the choices that are kept. `choose` has the
choice, `route` the drops: whole numbers, on the host. With E = 4, k = 1, and a capacity of 1, for
one example:

    position          0  1  2  3
    chosen expert     2  0  2  3        expert 1 has no row
    place in queue    0  0  1  0        place 1 is beyond the capacity: position 2 is dropped

Queues are decided for each example alone (GShard's groups, Lepikhin et al. 2020, section 2.2, of
one sequence). So a rank or a micro-batch decides what one device would, whoever else is there.

Balance without a loss: experts that are crowded are chosen less, by a bias (Wang et al.,
Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, algorithm 1; DeepSeek-AI,
DeepSeek-V3, 2024, section 2.1.2). P[B, T, E] are the scores.

    chosen = the k largest of P + b[E]          the gate's weight is P of the chosen, without b
    after each step: b_e += u sign(mean load - load_e)

A balancing loss pulls at the gate, beside the loss of the task. The bias is in no loss and has no
gradient. `load` is of the whole batch: of all micro-batches and, where ranks hold parts of a batch,
of all of them. So every split ends with the same bias. It is a frozen parameter, which a checkpoint
keeps. A load belongs to the gate's gradient: it is counted in backward, summed over the same ranks,
and dropped with it. What is only evaluated moves no bias; the bias of a frozen gate stays, too.

    loss.backward()
    sum_loads(model, group)        # with the gradients, where ranks hold parts (parallel/)
    optimizer.step()
    move_biases(model)
    optimizer.zero_grad()
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

import numpy as np

from minidist.autograd import Function, Tensor
from minidist.autograd.number_format import NumberFormat
from minidist.backend import Array, on_device_of, to_host
from minidist.errors import WrongInput, check_number, check_sizes
from minidist.nn.module import Module, Parameter, constant


@dataclass(frozen=True)
class Routing:
    """Which expert each position goes to.

    experts  their number, E
    chosen   [B, T, k], the experts of each position, best first
    kept     [B, T, k], whether a choice is within the expert's capacity
    counted  [B, T], whether a position counts in the balance of experts
    """

    experts: int
    chosen: np.ndarray
    kept: np.ndarray
    counted: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """How many choices of each example fall on each expert, dropped ones too: [B, E]."""
        choices = one_hot(self.chosen, self.experts) * self.counted[..., None, None]
        return choices.sum(axis=(1, 2))

    @property
    def load(self) -> np.ndarray:
        """The rows that each expert computes: [E]."""
        return np.bincount(self.chosen[self.kept], minlength=self.experts)

    def order(self) -> np.ndarray:
        """Return the flat indices in [B T k] of the choices that are kept, by expert: [R]."""
        kept = np.flatnonzero(self.kept)
        return kept[np.argsort(self.chosen.reshape(-1)[kept], kind="stable")]

    def at(self, positions: np.ndarray) -> "Routing":
        """Return the part of a rank that holds these positions of each sequence."""
        parts = (array[:, positions] for array in (self.chosen, self.kept, self.counted))
        return Routing(self.experts, *parts)


def choose(scores: np.ndarray, k: int, groups: int = 1, most_groups: int = 1) -> np.ndarray:
    """Return the experts of each position, best first, by scores[B, T, E]: chosen[B, T, k].

    DeepSeek-AI, DeepSeek-V3 (2024), section 2.1.2, node-limited routing: the experts are `groups`
    equal runs, and a position chooses from the best `most_groups` of them. A run is as good as the
    sum of its k / most_groups best experts. Where a run is on one host, a position's rows go to at
    most `most_groups` hosts.
    """
    if most_groups < groups:
        B, T, E = scores.shape
        of_groups = scores.reshape(B, T, groups, E // groups)
        best = np.sort(of_groups)[..., -max(1, k // most_groups) :].sum(axis=-1)
        taken = np.argsort(-best, axis=-1, kind="stable")[..., :most_groups]
        open_to = one_hot(taken, groups).max(axis=-2)[..., None] > 0
        scores = np.where(open_to, of_groups, -np.inf).reshape(scores.shape)
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def check_groups(experts: int, k: int, groups: int, most_groups: int) -> None:
    """Raise ValueError unless k experts can be chosen from most_groups of these equal runs."""
    check_number("groups is a whole number from 1", groups, lambda n: n >= 1, Integral)
    allowed = f"most_groups is a whole number from 1 to groups={groups}"
    check_number(allowed, most_groups, lambda n: 1 <= n <= groups, Integral)
    if experts % groups:
        raise WrongInput(f"{groups} groups do not divide {experts} experts; use a divisor")
    if k > (most := most_groups * experts // groups):
        raise WrongInput(
            f"cannot choose {k} experts from {most_groups} of {groups} groups, which have {most}; "
            f"use top_k={most}, or a larger most_groups"
        )


def route(
    chosen: np.ndarray,
    experts: int,
    capacity: int | None = None,
    counted: np.ndarray | None = None,
) -> Routing:
    """Return the routing of chosen[B, T, k], given how many rows of an example an expert takes.

    counted  [B, T], see Routing; None: all positions count

    An expert's queue is in the order of positions. So only earlier positions decide what is
    dropped, and the model stays causal. (In GShard's order, algorithm 1, all first choices come
    before all second ones: there a later token may drop an earlier one's second choice.)
    """
    counted = np.ones(chosen.shape[:2], bool) if counted is None else counted
    if capacity is None:
        return Routing(experts, chosen, np.ones(chosen.shape, bool), counted)
    B, T, k = chosen.shape
    queue = chosen.reshape(B, T * k, 1)
    length = np.cumsum(one_hot(queue[..., 0], experts), axis=1)  # with this choice in it
    place = np.take_along_axis(length, queue, axis=2) - 1
    return Routing(experts, chosen, place.reshape(B, T, k) < capacity, counted)


def one_hot(indices: np.ndarray, size: int) -> np.ndarray:
    return (indices[..., None] == np.arange(size)).astype(np.int64)


def rows_of_capacity(factor: float | None, k: int, positions: int, experts: int) -> int | None:
    """Return ceil(k T / E factor), exactly: the factor is the decimal number that is printed."""
    return None if factor is None else math.ceil(Fraction(str(factor)) * k * positions / experts)


class CountInBackward(Function):
    """Y = P  =>  dP = dY; with dY, the choices of this pass are counted."""

    def __init__(self, balance: "BiasBalance", chosen: np.ndarray):
        self.balance, self.chosen = balance, chosen

    def forward(self, p: Array) -> Array:
        return p

    def backward(self, grad: Array) -> Array:
        self.balance.count(self.chosen)
        return grad


class BiasBalance(Module):
    """b[E], in float64 whatever the model's dtype: a step u may be below the precision of b.

    gate  the weight whose gradient the load follows; None: none
    load  how often each expert was chosen in the passes that this gradient is of, drops included:
          [E], exact; zeros as soon as the gradient is dropped
    summed_over  the ranks whose choices are in it (as Parameter.summed_over)

    >>> balance = nn.BiasBalance(3, rate=0.125)
    >>> balance.count(np.array([[[0, 1], [0, 2], [0, 1]]]))
    >>> balance.move()
    >>> balance.load.tolist(), balance.bias.data.tolist()
    ([3, 2, 1], [-0.125, 0.0, 0.125])
    """

    training = True

    def __init__(self, experts: int, rate: float, gate: Parameter | None = None, *, name="gate"):
        check_sizes(experts=experts)
        check_number("bias_rate is a number from 0", rate, lambda x: 0 <= x < math.inf)
        self.rate, self.name = rate, f"{name}.choice_bias"
        self.bias = constant(self.name, (experts,), 0, "float64")
        self.bias.requires_grad, self.bias.format = False, NumberFormat(keeps_dtype=True)
        self.gate = self.bias if gate is None else gate
        self.forget()

    @property
    def values(self) -> np.ndarray:
        return to_host(self.bias.data)

    def gradient_number(self) -> int:
        """Return the number of the gate's present gradient: it rises when a gradient is dropped."""
        return self.gate.summed_in.drops

    def forget(self) -> None:
        """Begin anew, with the gradient that comes next."""
        self.choices, self.summed_over = np.zeros(self.bias.size, np.int64), frozenset[int]()
        self.begun = self.gradient_number()

    def follow(self) -> None:
        """Forget the load of a gradient that was dropped."""
        if self.begun != self.gradient_number():
            self.forget()

    @property
    def load(self) -> np.ndarray:
        self.follow()
        return self.choices

    def counted(self, p: Tensor, chosen: np.ndarray) -> Tensor:
        """Return P, whose gradient will count chosen[n, k], in training and if the gate trains."""
        return CountInBackward(self, chosen)(p) if self.training and self.gate.requires_grad else p

    def count(self, chosen: np.ndarray) -> None:
        """Add chosen[..., k] to the load of the gradient that is being computed."""
        self.choices = self.load + np.bincount(chosen.reshape(-1), minlength=self.bias.size)

    def move(self) -> None:
        """Raise the biases of experts below the mean load; lower the biases of experts above it."""
        if self.begun != self.gradient_number() and self.choices.any():
            raise WrongInput(
                f"the load of {self.name} belongs to a gradient that was dropped; call move_biases "
                "before zero_grad(), or move_biases(model, moved=False) after a batch that is "
                "dropped"
            )
        if left_out := self.gate.summed_over - self.summed_over:
            raise WrongInput(
                f"the gradient of {self.gate.name} is a sum over the ranks "
                f"{sorted(self.gate.summed_over)}, and the load of {self.name} leaves out "
                f"{sorted(left_out)}: their biases would come apart; call sum_loads(model, group) "
                "after backward (parallel/)"
            )
        step = self.rate * np.sign(self.load.sum() - len(self.load) * self.load)
        self.bias.data += on_device_of(step, self.bias.data)

    def __getstate__(self) -> dict:
        """A copy has no gradient, and so no load."""
        return vars(self) | {"choices": 0 * self.choices, "summed_over": frozenset()}


def move_biases(model: Module, moved: bool = True) -> None:
    """Move the biases of a model after its step; moved=False: the step was skipped, count anew."""
    for balance in model.modules(BiasBalance):
        if moved:
            balance.move()
        balance.forget()
