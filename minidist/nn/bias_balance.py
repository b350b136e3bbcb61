"""Balance without a loss: experts that are crowded are chosen less, by a bias.

Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (2024), algorithm 1;
DeepSeek-AI, DeepSeek-V3 (2024), section 2.1.2. Letters: E experts, P[B, T, E] their scores.

    chosen = the k largest of P + b[E]          the gate's weight is P of the chosen, without b
    after each step: b_e += u sign(mean load - load_e)

A balancing loss pulls at the gate, beside the loss of the task. The bias is in no loss and has no
gradient: it decides who is chosen. `load` is of the whole batch: of all micro-batches and, where
ranks hold parts of a batch, of all of them. So every split ends with the same bias. It is state: a
frozen parameter, which a checkpoint keeps.

A load belongs to the gate's gradient: it is counted in backward, summed over the same ranks, and
dropped with it. What is only evaluated, or whose gradient is dropped, moves no bias; the bias of a
frozen gate stays, too.

    loss.backward()
    sum_loads(model, group)        # with the gradients, where ranks hold parts (replicas/)
    optimizer.step()
    move_biases(model)
    optimizer.zero_grad()
"""

import math

import numpy as np

from minidist.autograd import Function, Tensor
from minidist.backend import Array, on_device_of, to_host
from minidist.errors import WrongInput, check_number, check_sizes
from minidist.nn.module import Module, Parameter, constant


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
        self.bias.requires_grad, self.bias.keeps_dtype = False, True
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
        """Raise the bias of experts below the mean load, lower that of those above."""
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
                "after backward (replicas/)"
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
