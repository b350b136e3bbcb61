"""Balance without a loss: experts that are crowded are chosen less, by a bias.

Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (2024), algorithm 1;
DeepSeek-AI, DeepSeek-V3 (2024), section 2.1.2. Letters: E experts, P[B, T, E] their scores.

    chosen = the k largest of P + b[E]          the gate's weight is P of the chosen, without b
    after each step: b_e += u sign(mean load - load_e)

A balancing loss pulls at the gate, beside the loss of the task. The bias is in no loss and has no
gradient: it decides who is chosen. `load` is of the whole batch: of all micro-batches and, where
ranks hold parts of a batch, of all of them. So every split ends with the same bias. It is state: a
frozen parameter, which a checkpoint keeps.

    loss.backward()
    sum_loads(model, group)        # with the gradients, where ranks hold parts (replicas/)
    optimizer.step()
    move_biases(model)
"""

import math

import numpy as np

from minidist.autograd.recording import is_recording
from minidist.backend import on_device_of, to_host
from minidist.errors import check_number
from minidist.nn.module import Module, check_sizes, constant


class BiasBalance(Module):
    """b[E], in float64 whatever the model's dtype: a step u may be below the precision of b.

    load  how often each expert was chosen, drops included, since b last moved: [E], exact

    >>> balance = nn.BiasBalance(3, rate=0.125)
    >>> balance.count(np.array([[[0, 1], [0, 2], [0, 1]]]))
    >>> balance.move()
    >>> balance.load.tolist(), balance.bias.data.tolist()
    ([3, 2, 1], [-0.125, 0.0, 0.125])
    """

    training = True

    def __init__(self, experts: int, rate: float, *, name="gate"):
        check_sizes(experts=experts)
        check_number("bias_rate is a number from 0", rate, lambda x: 0 <= x < math.inf)
        self.rate, self.load = rate, np.zeros(experts, np.int64)
        self.bias = constant(f"{name}.choice_bias", (experts,), 0, "float64")
        self.bias.requires_grad, self.bias.keeps_dtype = False, True

    @property
    def values(self) -> np.ndarray:
        return to_host(self.bias.data)

    def count(self, chosen: np.ndarray) -> None:
        """Add choices[B, T, k] to the load, in training; a pass that runs again counts once."""
        if self.training and is_recording():
            self.load += np.bincount(chosen.reshape(-1), minlength=len(self.load))

    def move(self) -> None:
        """Raise the bias of experts below the mean load, lower that of those above."""
        step = self.rate * np.sign(self.load.sum() - len(self.load) * self.load)
        self.bias.data += on_device_of(step, self.bias.data)


def move_biases(model: Module, moved: bool = True) -> None:
    """Move the biases of a model after its step; moved=False: the step was skipped, count anew."""
    for balance in model.modules(BiasBalance):
        if moved:
            balance.move()
        balance.load[:] = 0
