"""A linear layer, with an activation after it if one is named."""

import math

from minidist.autograd import Tensor, functions
from minidist.nn.module import Module, check_sizes, constant, draw
from minidist.rng import Randomness

ACTIVATIONS = {"identity": lambda x: x, "relu": functions.relu, "gelu": functions.gelu}
GAINS = {"identity": 1.0, "relu": math.sqrt(2), "gelu": math.sqrt(2)}


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r}: choose one of {', '.join(ACTIVATIONS)}")


class Linear(Module):
    """Y[..., C_out] = activation(X[..., C_in] W[C_in, C_out] + b[C_out]).

    The weight is normal with variance gain^2 / C_in (He et al. 2015, equation 10: gain^2 = 2 before
    a relu), the bias 0. `name` is the global name of the layer: two layers of one shape are drawn
    differently because their names differ.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias=True,
        activation="identity",
        *,
        name="linear",
        seed=0,
        dtype="float32",
    ):
        check_activation(activation)
        check_sizes(inputs=inputs, outputs=outputs)
        self.activation = activation
        scale = GAINS[activation] / math.sqrt(inputs)
        self.weight = draw(f"{name}.weight", (inputs, outputs), scale, seed, dtype)
        self.bias = constant(f"{name}.bias", (outputs,), 0, dtype) if bias else None

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return ACTIVATIONS[self.activation](functions.linear(x, self.weight, self.bias))
